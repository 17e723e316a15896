//! Names of objects in a storage.

use std::fmt;
use std::sync::Arc;

use crate::text::Quoted;

/// The name of an object in a [`Storage`](crate::Storage): segments joined by `/`, relative to the
/// storage's root, which it cannot leave.
///
/// ```
/// use dcp_core::Key;
///
/// assert!(Key::new("step_10/__0_0.distcp").is_ok());
/// assert!(Key::new("../other").is_err());
/// assert!(Key::new("/etc/passwd").is_err());
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

/// A name that is not a valid key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid key {key}: {reason}", key = Quoted(.key))]
pub struct InvalidKey {
    /// The name as given.
    pub key: String,
    /// The reason.
    pub reason: &'static str,
}

impl Key {
    /// Validates `name` as a key.
    ///
    /// # Errors
    ///
    /// When the name is empty or absolute, has an empty, `.` or `..` segment, a backslash or a NUL,
    /// or begins with a Windows drive.
    pub fn new(name: impl AsRef<str>) -> Result<Self, InvalidKey> {
        let name = name.as_ref();
        let refuse = |reason| Err(InvalidKey { key: name.to_owned(), reason });
        if name.is_empty() {
            return refuse("it is empty");
        }
        if name.starts_with('/') {
            return refuse("it is absolute");
        }
        if name.contains(['\\', '\0']) {
            return refuse("it holds a backslash or a NUL");
        }
        if name.as_bytes().get(1) == Some(&b':') && name.as_bytes()[0].is_ascii_alphabetic() {
            return refuse("it begins with a drive letter");
        }
        for segment in name.split('/') {
            match segment {
                "" => return refuse("it has an empty segment"),
                "." | ".." => return refuse("it has a `.` or `..` segment"),
                _ => {}
            }
        }
        Ok(Self(name.into()))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key `name` in the folder `self`.
    ///
    /// # Errors
    ///
    /// As [`Key::new`], for the appended part.
    pub fn join(&self, name: &str) -> Result<Self, InvalidKey> {
        Key::new(name)?;
        Ok(Self(format!("{}/{name}", self.0).into()))
    }

    /// The last segment.
    #[must_use]
    pub fn file_name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// Whether this key is `prefix` or is in the folder `prefix`, segment by segment.
    #[must_use]
    pub fn is_under(&self, prefix: &Key) -> bool {
        self.0.strip_prefix(&*prefix.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Quoted(&self.0), f)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl AsRef<str> for Key {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl TryFrom<&str> for Key {
    type Error = InvalidKey;

    fn try_from(name: &str) -> Result<Self, InvalidKey> {
        Key::new(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_root_are_refused() {
        for bad in ["", "/a", "a//b", "a/", "..", "a/../b", "./a", "a\\b", "C:/x", "c:x", "a\0"] {
            assert!(Key::new(bad).is_err(), "{bad:?}");
        }
        for good in [".metadata", "a/b", "a b%#~é", "...", "__0_0.distcp"] {
            assert!(Key::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn prefixes_match_by_segment() {
        let dir = Key::new("step_1").unwrap();
        assert!(dir.join("x").unwrap().is_under(&dir));
        assert!(!Key::new("step_10/x").unwrap().is_under(&dir));
    }
}
