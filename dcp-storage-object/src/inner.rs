//! The state that the operations of a storage share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dcp_core::error::StorageOp as Op;
use dcp_core::storage::{Capabilities, ObjectMeta, Version};
use dcp_core::{Key, StorageError, StorageErrorKind as Kind};
use object_store::path::Path;
use object_store::{GetResult, ObjectStore};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::error::Failure;
use crate::native::{Completion, OpenUploads, Replacement};
use crate::object_read::get_options;
use crate::path::Prefix;
use crate::provider::Provider;
use crate::retry::{Attempts, RetryPolicy};

/// Bytes in flight are counted in units of this many.
pub(crate) const PERMIT_BYTES: u64 = 4096;

/// The beginning of the version of an object without an ETag.
pub(crate) const MODIFIED: &str = "modified-";

/// A store, and how it is used.
pub(crate) struct Inner {
    pub(crate) store: Arc<dyn ObjectStore>,
    pub(crate) prefix: Prefix,
    pub(crate) provider: Provider,
    pub(crate) capabilities: Capabilities,
    pub(crate) request_bytes: u64,
    pub(crate) retry: RetryPolicy,
    pub(crate) stall: Duration,
    /// The time that a read waits before it makes a request again; `None` if it does not.
    pub(crate) hedge: Option<Duration>,
    /// One permit for each [`PERMIT_BYTES`] in flight.
    pub(crate) permits: Semaphore,
    pub(crate) permits_max: u32,
    pub(crate) completion: Option<Arc<dyn Completion>>,
    pub(crate) replacement: Option<Arc<dyn Replacement>>,
    pub(crate) open_uploads: Option<Arc<dyn OpenUploads>>,
    /// Whether a request has shown that the bucket exists.
    pub(crate) bucket_seen: AtomicBool,
}

impl Inner {
    /// The facts about an object that a store returned.
    pub(crate) fn meta(&self, key: &Key, meta: object_store::ObjectMeta) -> ObjectMeta {
        let modified = meta.last_modified;
        // Stores return the epoch for an unknown time.
        let modified = (modified.timestamp_millis() != 0).then(|| modified.into());
        let version = self.version(&meta);
        ObjectMeta::new(key.clone(), meta.size).with_modified(modified).with_version(version)
    }

    /// The version of an object: its ETag; on web servers without ETags, the time of the last write
    /// with the length.
    pub(crate) fn version(&self, meta: &object_store::ObjectMeta) -> Option<Version> {
        let time = meta.last_modified.timestamp_millis();
        match &meta.e_tag {
            Some(tag) => Some(Version::new(self.provider.version_text(tag.clone()))),
            None if self.provider == Provider::Http && time != 0 => {
                Some(Version::new(format!("{MODIFIED}{time}-{}", meta.size)))
            }
            None => None,
        }
    }

    /// The version that a write returned.
    pub(crate) fn version_of_tag(&self, e_tag: Option<String>) -> Option<Version> {
        e_tag.map(|tag| Version::new(self.provider.version_text(tag)))
    }

    /// Waits until `len` more bytes may be in flight.
    pub(crate) async fn permit(&self, len: u64) -> Option<SemaphorePermit<'_>> {
        let permits = u32::try_from(len.div_ceil(PERMIT_BYTES)).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        self.permits.acquire_many(permits.clamp(1, self.permits_max)).await.ok()
    }

    /// The facts and attributes of an object.
    pub(crate) async fn head(
        &self,
        op: Op,
        path: &Path,
        attempts: &mut Attempts,
    ) -> Result<GetResult, Failure> {
        // The answer to a HEAD does not tell a missing bucket from a missing object, which costs
        // another request where no object was seen yet.
        let is_first = !self.bucket_seen.load(Ordering::Relaxed);
        if is_first && matches!(self.provider, Provider::S3 | Provider::Gcs | Provider::Azure) {
            let options = get_options().with_range(Some(0..1));
            match attempts.request(op, self.store.get_opts(path, options)).await {
                Err(failure) if failure.kind != Kind::NotFound => {}
                answer => {
                    self.bucket_seen.store(true, Ordering::Relaxed);
                    return answer;
                }
            }
        }
        loop {
            let options = get_options().with_head(true);
            let failure = match attempts.request(op, self.store.get_opts(path, options)).await {
                Ok(found) => {
                    self.bucket_seen.store(true, Ordering::Relaxed);
                    return Ok(found);
                }
                Err(failure) => failure,
            };
            // The answer to a HEAD has no body, which says what is missing or denied.
            let is_unclear = match failure.kind {
                Kind::NotFound => !self.bucket_seen.load(Ordering::Relaxed),
                Kind::Denied | Kind::Other => failure.status.is_some(),
                _ => false,
            };
            let failure = match is_unclear {
                true => self.explained(op, path, attempts, failure).await,
                false => failure,
            };
            attempts.pause(failure).await?;
        }
    }

    /// The failure of a HEAD, as the answer to a GET explains it.
    async fn explained(
        &self,
        op: Op,
        path: &Path,
        attempts: &mut Attempts,
        failure: Failure,
    ) -> Failure {
        let options = get_options().with_range(Some(0..1));
        match attempts.request(op, self.store.get_opts(path, options)).await {
            Ok(_) => failure,
            Err(explained) => {
                if explained.kind == Kind::NotFound {
                    self.bucket_seen.store(true, Ordering::Relaxed);
                }
                explained
            }
        }
    }

    pub(crate) fn check_writable(&self, op: Op, key: Option<&Key>) -> Result<(), StorageError> {
        match self.capabilities.writable {
            true => Ok(()),
            false => Err(StorageError::new(Kind::Unsupported, op, key.cloned())
                .with_message("this storage is only read")),
        }
    }
}
