//! Comparable places of URLs, with their folders and names.

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

/// The folder that a URL is in, and its name there; `None` for a root, such as a bucket. The query of a
/// web server's URL belongs to every request, so it stays with the folder.
///
/// ```
/// use dcp_core::location::split_url;
/// assert_eq!(split_url("s3://bucket/model.pt"), Some(("s3://bucket".into(), "model.pt".into())));
/// assert_eq!(split_url("model.pt"), Some((".".into(), "model.pt".into())));
/// assert_eq!(split_url("s3://bucket"), None);
/// assert_eq!(
///     split_url("https://host/model.pt?sig=x"),
///     Some(("https://host?sig=x".into(), "model.pt".into())),
/// );
/// ```
#[must_use]
pub fn split_url(url: &str) -> Option<(String, String)> {
    let (url, query) = split_query(url);
    let (scheme, path) = match url.split_once("://") {
        Some((scheme, path)) => (format!("{scheme}://"), path),
        None => (String::new(), url),
    };
    let path = path.trim_end_matches('/');
    if !path.contains('/') && !matches!(&*scheme, "" | "file://") {
        return None;
    }
    let (parent, name) = match path.rsplit_once('/') {
        Some(("", name)) => ("/", name),
        Some((parent, name)) => (parent, name),
        None => (".", path),
    };
    (!name.is_empty()).then(|| (format!("{scheme}{parent}{query}"), name.to_owned()))
}

/// The URL of `name` in the folder `url`.
#[must_use]
pub fn below_url(url: &str, name: &str) -> String {
    let (url, query) = split_query(url);
    format!("{}/{name}{query}", url.trim_end_matches('/'))
}

/// The URL of a web server without its query and fragment, and those. In other URLs and on a disk they
/// are a part of a name.
fn split_query(url: &str) -> (&str, &str) {
    let is_web = url.starts_with("http://") || url.starts_with("https://");
    url.split_at(url.find(['?', '#']).filter(|_| is_web).unwrap_or(url.len()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn urls_split_into_folder_and_name() {
        let split = |url| super::split_url(url).unwrap();
        assert_eq!(split("a/b.npy"), ("a".into(), "b.npy".into()));
        assert_eq!(split("b.npy"), (".".into(), "b.npy".into()));
        assert_eq!(split("/b"), ("/".into(), "b".into()));
        assert_eq!(split("file:///x/y/"), ("file:///x".into(), "y".into()));
        assert_eq!(split("s3://bucket/x"), ("s3://bucket".into(), "x".into()));
        assert_eq!(split("http://h/a/b?c=/d"), ("http://h/a?c=/d".into(), "b".into()));
        assert_eq!(split("https://h/a/b/?c#d"), ("https://h/a?c#d".into(), "b".into()));
        assert_eq!(split("s3://bucket/x?y"), ("s3://bucket".into(), "x?y".into()));
        assert_eq!(split("a/x?y=z"), ("a".into(), "x?y=z".into()));
        assert_eq!(super::below_url("http://h/a/?c=d", "b"), "http://h/a/b?c=d");
        assert_eq!(super::below_url("a?c=d", "b"), "a?c=d/b");
        assert!(super::split_url("http://h?a=b/c").is_none());
        assert!(super::split_url("/").is_none());
        assert!(super::split_url("s3://bucket").is_none());
        assert!(super::split_url("s3://bucket/").is_none());
    }
}
