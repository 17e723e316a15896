//! Keys as paths of the store, below the storage's prefix.

use dcp_core::error::StorageOp;
use dcp_core::{Key, StorageError, StorageErrorKind};
use object_store::path::Path;

/// Objects of this name are uploads that have not ended. They are not listed, and no key names one.
pub(crate) const UPLOAD_NAME: &str = ".dcp-upload-";

/// The folder of the store in which a storage's keys are; empty for all of the store.
#[derive(Clone, Debug)]
pub(crate) struct Prefix(String);

impl Prefix {
    /// A folder by its segments. Slashes at the ends do not count.
    pub(crate) fn new(prefix: &str) -> Result<Self, StorageError> {
        let prefix = prefix.trim_matches('/');
        Path::parse(prefix).map_err(|error| {
            StorageError::new(StorageErrorKind::Invalid, StorageOp::Open, None)
                .with_message(format!("the prefix is not a path: {error}"))
        })?;
        Ok(Self(prefix.to_owned()))
    }

    /// The path of a key.
    pub(crate) fn path(&self, op: StorageOp, key: &Key) -> Result<Path, StorageError> {
        if key.file_name().starts_with(UPLOAD_NAME) {
            let error = StorageError::new(StorageErrorKind::Invalid, op, Some(key.clone()));
            return Err(error.with_message("names of this form are those of unfinished uploads"));
        }
        self.folder(op, Some(key))
    }

    /// The path of a folder.
    pub(crate) fn folder(&self, op: StorageOp, key: Option<&Key>) -> Result<Path, StorageError> {
        let path = match (self.0.as_str(), key) {
            (prefix, None) => prefix.to_owned(),
            ("", Some(key)) => key.as_str().to_owned(),
            (prefix, Some(key)) => format!("{prefix}/{key}"),
        };
        // `Path::from` would encode some characters, so that the object has another name.
        Path::parse(&path).map_err(|error| {
            StorageError::new(StorageErrorKind::Invalid, op, key.cloned())
                .with_message(error.to_string())
        })
    }

    /// A listed path relative to the prefix, as text.
    pub(crate) fn below<'a>(&self, path: &'a Path) -> &'a str {
        let path = path.as_ref();
        let below = path.strip_prefix(self.0.as_str());
        below.map_or(path, |below| below.trim_start_matches('/'))
    }

    /// The key of a listed path; `None` for what is no key or an unfinished upload, or is not below
    /// the prefix.
    pub(crate) fn key(&self, path: &Path) -> Option<Key> {
        let path = path.as_ref();
        let name = match self.0.as_str() {
            "" => path,
            prefix => path.strip_prefix(prefix)?.strip_prefix('/')?,
        };
        let key = Key::new(name).ok()?;
        (!key.file_name().starts_with(UPLOAD_NAME)).then_some(key)
    }
}

/// The path of an unfinished upload of the object at `path`.
pub(crate) fn upload_path(path: &Path, nonce: &str) -> Path {
    let name = format!("{UPLOAD_NAME}{nonce}");
    let text = match path.as_ref().rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/{name}"),
        None => name,
    };
    // A name of ASCII letters, digits, dots and dashes is a path.
    Path::parse(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// An object that is written under a key is listed under that key, or refused.
        #[test]
        fn keys_survive(name in "[ -~é%#]{1,12}(/[ -~é%#]{1,12}){0,3}", prefix in "(a/b%20c)?") {
            let prefix = Prefix::new(&prefix).unwrap();
            if let Ok(key) = Key::new(&name) {
                match prefix.path(StorageOp::Put, &key) {
                    Ok(path) => prop_assert_eq!(prefix.key(&path), Some(key)),
                    Err(error) => prop_assert_eq!(error.kind(), StorageErrorKind::Invalid),
                }
            }
        }
    }

    #[test]
    fn unfinished_uploads_are_no_keys() {
        let prefix = Prefix::new("/run/").unwrap();
        let key = Key::new("a/b").unwrap();
        let path = prefix.path(StorageOp::Put, &key).unwrap();
        assert_eq!(path.as_ref(), "run/a/b");
        let upload = upload_path(&path, "1f");
        assert_eq!(upload.as_ref(), "run/a/.dcp-upload-1f");
        assert_eq!(prefix.key(&upload), None);
        let key = Key::new("a/.dcp-upload-1f").unwrap();
        assert!(prefix.path(StorageOp::Stat, &key).is_err());
        // Another folder whose name begins alike.
        assert_eq!(prefix.key(&Path::parse("run2/a").unwrap()), None);
    }
}
