//! From URLs to storages.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::storage::Storage;

/// What a storage is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// To read what is there; the place must exist.
    Read,
    /// To write; the place is made if need be.
    Write,
}

type Open = dyn Fn(&str, Access) -> Result<Arc<dyn Storage>, StorageError> + Send + Sync;
type Layer = dyn Fn(Arc<dyn Storage>, Access) -> Arc<dyn Storage> + Send + Sync;

/// Which storage serves which URL scheme.
///
/// A plug-in is registered under its scheme, and its URLs then work wherever a registry is used:
///
/// ```
/// # use dcp_core::{Access, StorageError, StorageErrorKind, StorageOp, StorageRegistry};
/// let mut storages = StorageRegistry::empty();
/// storages.register("tape", |url, _access| {
///     Err(StorageError::new(StorageErrorKind::Unsupported, StorageOp::Open, None)
///         .with_message(format!("no tape drive for {url}")))
/// });
/// assert!(storages.open("tape://7/run", Access::Read).is_err());
/// ```
#[derive(Clone)]
pub struct StorageRegistry {
    openers: BTreeMap<String, Arc<Open>>,
    /// The innermost first.
    layers: Vec<Arc<Layer>>,
}

impl StorageRegistry {
    /// No scheme at all.
    #[must_use]
    pub fn empty() -> Self {
        Self { openers: BTreeMap::new(), layers: Vec::new() }
    }

    /// Lets `opener` serve URLs of `scheme`, in place of any that did before. It does no I/O
    /// beyond what finds whether the place can be used.
    pub fn register<F>(&mut self, scheme: impl Into<String>, opener: F)
    where
        F: Fn(&str, Access) -> Result<Arc<dyn Storage>, StorageError> + Send + Sync + 'static,
    {
        self.openers.insert(scheme.into(), Arc::new(opener));
    }

    /// The same registry, with every storage that it opens wrapped by `layer`: a cache, a counter,
    /// or the faults of a test.
    #[must_use]
    pub fn with_layer<F>(mut self, layer: F) -> Self
    where
        F: Fn(Arc<dyn Storage>, Access) -> Arc<dyn Storage> + Send + Sync + 'static,
    {
        self.layers.push(Arc::new(layer));
        self
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
        let storage = opener(url, access)?;
        Ok(self.layers.iter().fold(storage, |storage, layer| layer(storage, access)))
    }
}

impl fmt::Debug for StorageRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.openers.keys()).finish()
    }
}
