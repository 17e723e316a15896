//! The storages of this build's features.

#[cfg(feature = "fs")]
use std::path::{Path, PathBuf};

use dcp_core::error::StorageOp;
#[cfg(feature = "fs")]
use dcp_core::registry::Access;
use dcp_core::registry::StorageRegistry;
use dcp_core::{StorageError, StorageErrorKind};

/// The storages of this build's features by URL scheme; with `fs`, `file://` and plain paths; with
/// `s3`, `gcs`, `azure`, `http` and `memory`, those of object stores.
///
/// Credentials come from the environment, as each provider's own tools read it, and from
/// [`StorageRegistry::options`]. The registry keeps connections: clone it rather than make
/// another.
///
/// Symbolic links lead no further than the folder that is opened and, in the cache of the Hugging
/// Face hub, its repository. [`storages_following_links`] has no such bound.
///
/// ```
/// use dcp::core::registry::Access;
///
/// let storages = dcp::default_storages();
/// let opened = dcp::block_on(storages.open("tape://7/run", Access::Read))?;
/// assert!(opened.is_err());
/// # Ok::<(), dcp::CheckpointError>(())
/// ```
#[must_use]
pub fn default_storages() -> StorageRegistry {
    let mut registry = StorageRegistry::empty();
    #[cfg(feature = "fs")]
    registry.register("file", |request| {
        let (path, access) = (path_of(&request.url), request.access);
        let builder = dcp_storage_fs::FsStorage::builder(path);
        let builder = match hub_repository(Path::new(path)) {
            Some(repository) if access == Access::Read => builder.links_within(repository),
            _ => builder.create(access == Access::Write).clean(access == Access::Write),
        };
        Ok(std::sync::Arc::new(builder.open()?))
    });
    #[cfg(feature = "object-storage")]
    dcp_storage_object::register(&mut registry);
    name_features(&mut registry);
    registry
}

/// Lets URLs of object stores that this build leaves out fail with the feature that serves them.
fn name_features(registry: &mut StorageRegistry) {
    const ABSENT: [(&str, &str, bool); 7] = [
        ("s3", "s3", cfg!(feature = "s3")),
        ("gs", "gcs", cfg!(feature = "gcs")),
        ("az", "azure", cfg!(feature = "azure")),
        ("abfss", "azure", cfg!(feature = "azure")),
        ("http", "http", cfg!(feature = "http")),
        ("https", "http", cfg!(feature = "http")),
        ("memory", "memory", cfg!(feature = "memory")),
    ];
    for (scheme, feature, _) in ABSENT.into_iter().filter(|(.., is_there)| !is_there) {
        registry.register(scheme, move |_| {
            let message = format!(
                "build the package distcp with the feature {feature:?} for {scheme}:// URLs"
            );
            let kind = StorageErrorKind::Unsupported;
            Err(StorageError::new(kind, StorageOp::Open, None).with_message(message))
        });
    }
}

/// [`default_storages`], but what is read follows symbolic links wherever they lead, as in a run
/// whose iterations are links to another disk. Only for folders that you trust: a link can lead to
/// any file.
#[cfg(feature = "fs")]
#[must_use]
pub fn storages_following_links() -> StorageRegistry {
    let mut registry = default_storages();
    registry.register("file", |request| {
        let write = request.access == Access::Write;
        let builder = dcp_storage_fs::FsStorage::builder(path_of(&request.url));
        let storage = builder.follow_links(!write).create(write).clean(write).open();
        Ok::<_, StorageError>(std::sync::Arc::new(storage?))
    });
    registry
}

#[cfg(feature = "fs")]
fn path_of(url: &str) -> &str {
    url.strip_prefix("file://").unwrap_or(url)
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
