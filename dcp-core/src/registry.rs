//! Opens storages by URL.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::location::Location;
use crate::storage::Storage;

/// The purpose of opening a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// Reading; the location must exist.
    Read,
    /// Writing; the location is created if needed.
    Write,
}

type Locate = dyn Fn(&str) -> Vec<Location> + Send + Sync;
type Open = dyn Fn(&str, Access) -> Result<Arc<dyn Storage>, StorageError> + Send + Sync;
type Layer = dyn Fn(Arc<dyn Storage>, Access) -> Arc<dyn Storage> + Send + Sync;

/// The storage of each URL scheme.
///
/// A plug-in registers its scheme; its URLs then work wherever the registry is used:
///
/// ```
/// # use dcp_core::{StorageError, StorageErrorKind};
/// # use dcp_core::error::StorageOp;
/// # use dcp_core::registry::{Access, StorageRegistry};
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
    locators: BTreeMap<String, Arc<Locate>>,
    /// Layers, innermost first.
    layers: Vec<Arc<Layer>>,
}

impl StorageRegistry {
    /// A registry without schemes.
    #[must_use]
    pub fn empty() -> Self {
        Self { openers: BTreeMap::new(), locators: BTreeMap::new(), layers: Vec::new() }
    }

    /// Registers `opener` for URLs of `scheme`, replacing an earlier one. An opener does no I/O
    /// beyond checking that the location is usable.
    pub fn register<F>(&mut self, scheme: impl Into<String>, opener: F)
    where
        F: Fn(&str, Access) -> Result<Arc<dyn Storage>, StorageError> + Send + Sync + 'static,
    {
        self.openers.insert(scheme.into(), Arc::new(opener));
    }

    /// Lets `locator` say which places a URL of `scheme` names, so that a job refuses to write into
    /// what it reads. Without one, URLs of the scheme are places of their own: equal where their
    /// segments are. A scheme whose URLs name a place in several ways, such as by an endpoint or a
    /// link, needs one.
    ///
    /// ```
    /// # use dcp_core::registry::StorageRegistry;
    /// # use dcp_core::location::Location;
    /// let mut storages = StorageRegistry::empty();
    /// // `backup://x` is the bucket that `s3://backup/x` names.
    /// storages.register_locator("backup", |url| {
    ///     let path = url.trim_start_matches("backup://");
    ///     Location::of_url(&format!("s3://backup/{path}")).into_iter().collect()
    /// });
    /// let found = storages.locate("backup://run/step1").unwrap();
    /// assert!(found[0].is_in(&Location::of_url("s3://backup/run/").unwrap()));
    /// ```
    pub fn register_locator<F>(&mut self, scheme: impl Into<String>, locator: F)
    where
        F: Fn(&str) -> Vec<Location> + Send + Sync + 'static,
    {
        self.locators.insert(scheme.into(), Arc::new(locator));
    }

    /// The places that a URL names, where a locator is registered for its scheme; several where the
    /// storage has links.
    #[must_use]
    pub fn locate(&self, url: &str) -> Option<Vec<Location>> {
        let scheme = url.split_once("://").map_or("file", |(scheme, _)| scheme);
        self.locators.get(scheme).map(|locate| locate(url))
    }

    /// Wraps every storage that the registry opens with `layer`: a cache, a counter, or the faults
    /// of a test.
    #[must_use]
    pub fn with_layer<F>(mut self, layer: F) -> Self
    where
        F: Fn(Arc<dyn Storage>, Access) -> Arc<dyn Storage> + Send + Sync + 'static,
    {
        self.layers.push(Arc::new(layer));
        self
    }

    /// Opens the storage of a URL; a plain path has the scheme `file`.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](StorageErrorKind::Unsupported) for an unregistered scheme; errors of the
    /// opener.
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
