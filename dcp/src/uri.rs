//! From URLs to storages.

use std::collections::BTreeMap;
use std::fmt;
#[cfg(feature = "fs")]
use std::path::{Path, PathBuf};
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
            let builder = dcp_storage_fs::FsStorage::builder(path);
            let builder = match hub_repository(Path::new(path)) {
                Some(repository) if access == Access::Read => builder.links_within(repository),
                _ => builder.create(access == Access::Write).clean(access == Access::Write),
            };
            Ok(Arc::new(builder.open()?))
        });
        registry
    }

    /// The same, but symbolic links on a file system are followed wherever they lead when
    /// something is read, as in a run whose iterations are links to another disk. By default they
    /// lead no further than the folder that was opened and, in the cache of the Hugging Face hub,
    /// its repository. Only for folders that you trust: a link can lead to any file.
    #[cfg(feature = "fs")]
    #[must_use]
    pub fn following_links(mut self) -> Self {
        self.register("file", |url, access| {
            let path = url.strip_prefix("file://").unwrap_or(url);
            let write = access == Access::Write;
            let builder = dcp_storage_fs::FsStorage::builder(path);
            Ok(Arc::new(builder.follow_links(!write).create(write).clean(write).open()?))
        });
        self
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

/// The repository that a snapshot in the cache of the Hugging Face hub is of:
/// `models--ORG--NAME`, where files of `snapshots/REVISION` are links into `blobs`.
#[cfg(feature = "fs")]
fn hub_repository(path: &Path) -> Option<PathBuf> {
    let path = path.canonicalize().ok()?;
    let snapshots = path.ancestors().find(|above| above.ends_with("snapshots"))?;
    let repository = snapshots.parent()?;
    repository.join("blobs").is_dir().then(|| repository.to_owned())
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
