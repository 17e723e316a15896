//! Which URLs name one place.

/// A place in a storage. Jobs compare places to find URLs that name the same files.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    storage: String,
    names: Vec<String>,
}

impl Location {
    /// The file or folder that these names lead to, in the storage of this identity.
    #[must_use]
    pub fn new(storage: impl Into<String>, names: impl Into<Vec<String>>) -> Self {
        Self { storage: storage.into(), names: names.into() }
    }

    /// The segments of a URL, of which empty ones and `.` do not count; `None` without a scheme.
    #[must_use]
    pub fn of_url(url: &str) -> Option<Self> {
        let (scheme, path) = url.split_once("://")?;
        let names = path.split('/').filter(|name| !name.is_empty() && *name != ".");
        Some(Self::new(scheme.to_ascii_lowercase(), names.map(str::to_owned).collect::<Vec<_>>()))
    }

    /// Whether it is `other`, or is in it.
    #[must_use]
    pub fn is_in(&self, other: &Self) -> bool {
        self.storage == other.storage && self.names.starts_with(&other.names)
    }
}
