//! From URLs to storages.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use dcp_core::{Storage, StorageError, StorageErrorKind, StorageOp};

/// What a storage is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// To read what is there; the place must exist.
    Read,
    /// To write; the place is made if need be.
    Write,
}

type Opener = dyn Fn(&str, Access) -> Result<Arc<dyn Storage>, StorageError> + Send + Sync;

/// Which storage serves which URL scheme.
///
/// A plug-in is registered under its scheme, and its URLs then work wherever a registry is used:
///
/// ```
/// # use dcp::{Access, StorageRegistry};
/// # use dcp::core::{StorageError, StorageErrorKind, StorageOp};
/// let mut registry = StorageRegistry::with_defaults();
/// registry.register("tape", |url, _access| {
///     Err(StorageError::new(StorageErrorKind::Unsupported, StorageOp::Open, None)
///         .with_message(format!("no tape drive for {url}")))
/// });
/// assert!(registry.open("tape://7/run", Access::Read).is_err());
/// ```
#[derive(Clone)]
pub struct StorageRegistry {
    openers: BTreeMap<String, Arc<Opener>>,
}

impl StorageRegistry {
    /// No scheme at all.
    #[must_use]
    pub fn empty() -> Self {
        Self { openers: BTreeMap::new() }
    }

    /// The schemes of this build's features; with `fs`, `file://` and plain paths.
    #[must_use]
    pub fn with_defaults() -> Self {
        #[allow(unused_mut, reason = "nothing is registered without features")]
        let mut registry = Self::empty();
        #[cfg(feature = "fs")]
        registry.register("file", |url, access| {
            let path = url.strip_prefix("file://").unwrap_or(url);
            let storage = dcp_storage_fs::FsStorage::builder(path)
                .create(access == Access::Write)
                .clean(access == Access::Write)
                .open()?;
            Ok(Arc::new(storage))
        });
        registry
    }

    /// Lets `opener` serve URLs of `scheme`, in place of any that did before. It does no I/O
    /// beyond what tells whether the place can be used.
    pub fn register<F>(&mut self, scheme: impl Into<String>, opener: F)
    where
        F: Fn(&str, Access) -> Result<Arc<dyn Storage>, StorageError> + Send + Sync + 'static,
    {
        self.openers.insert(scheme.into(), Arc::new(opener));
    }

    /// Opens the storage of a URL, or of a plain path as `file`.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](StorageErrorKind::Unsupported) for a scheme that nobody serves, and what
    /// the storage finds.
    pub fn open(&self, url: &str, access: Access) -> Result<Arc<dyn Storage>, StorageError> {
        let scheme = url.split_once("://").map_or("file", |(scheme, _)| scheme);
        let opener = self.openers.get(scheme).ok_or_else(|| {
            let known = self.openers.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            StorageError::new(StorageErrorKind::Unsupported, StorageOp::Open, None)
                .with_message(format!("{url:?}: this build serves {known} only"))
        })?;
        opener(url, access)
    }
}

impl Default for StorageRegistry {
    fn default() -> Self {
        Self::with_defaults()
    }
}

impl fmt::Debug for StorageRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.openers.keys()).finish()
    }
}
