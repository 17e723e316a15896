//! [`Storage`] on a folder.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Upload};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::{TryStreamExt, stream};

use crate::blocking::blocking;
use crate::error::{classify, on_key};
use crate::leftovers;
use crate::lock::FsClaim;
use crate::shared::{Shared, is_reserved};
use crate::upload::FsUpload;
use crate::walk::look_into;
use crate::write::write_payload;

/// Objects as files below a root folder; clones share it. See the [crate](crate) documentation.
#[derive(Clone, Debug)]
pub struct FsStorage(Arc<Shared>);

impl FsStorage {
    pub(crate) fn new(shared: Shared) -> Self {
        Self(Arc::new(shared))
    }

    /// The root folder as it was given.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.0.root.path()
    }

    /// Removes temporary files of writers that were killed, in all folders, and returns how many.
    ///
    /// A file is removed when its last write is older than `min_age` and its writer does not run any
    /// more. Of writers on other machines the latter is not known, so on a shared file system
    /// `min_age` should be longer than any write takes.
    ///
    /// # Errors
    ///
    /// When a folder cannot be read, or a file not be removed.
    pub async fn clean_leftovers(&self, min_age: Duration) -> Result<u64, StorageError> {
        let Shared { root, sync, .. } = &*self.0;
        let (root, sync) = (Arc::clone(root), *sync);
        blocking(StorageOp::Delete, None, move || {
            leftovers::clean(&root, min_age, sync)
                .map_err(|error| classify(StorageOp::Delete, None, error))
        })
        .await
    }
}

#[async_trait]
impl Storage for FsStorage {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::none();
        capabilities.atomic_create = true;
        capabilities.claims = true;
        capabilities.durable = self.0.sync;
        capabilities.ranged_reads = true;
        // A page: what the system reads anyway. More would be read faster from a disk that spins,
        // but many ranks that each read their columns share one file server.
        capabilities.coalesce_gap = 4 << 10;
        capabilities.parallelism = self.0.parallelism;
        capabilities
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        blocking(StorageOp::Stat, Some(key), move || shared.stat(StorageOp::Stat, &for_thread))
            .await
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        if is_reserved(key) {
            let kind = StorageErrorKind::NotFound;
            return Err(StorageError::new(kind, StorageOp::Read, Some(key.clone())));
        }
        crate::read::read(Arc::clone(&self.0.root), key, reads, self.0.parallelism).await
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError> {
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        blocking(StorageOp::Put, Some(key), move || {
            let (op, key) = (StorageOp::Put, &for_thread);
            let temp = shared.create_temp(op, key)?;
            write_payload(&mut temp.file(), &payload).map_err(on_key(op, key))?;
            shared.publish(op, key, temp, mode)
        })
        .await
    }

    async fn start_upload(
        &self,
        key: &Key,
        mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        let temp = blocking(StorageOp::Upload, Some(key), move || {
            let (op, key) = (StorageOp::Upload, &for_thread);
            match shared.stat(op, key) {
                Ok(_) if mode == PutMode::Create => {
                    let kind = StorageErrorKind::AlreadyExists;
                    Err(StorageError::new(kind, op, Some(key.clone())))
                }
                Err(error) if error.kind() != StorageErrorKind::NotFound => Err(error),
                _ => shared.create_temp(op, key),
            }
        })
        .await?;
        Ok(Box::new(FsUpload::new(Arc::clone(&self.0), key.clone(), mode, temp)))
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        let root = Arc::clone(&self.0.root);
        let first = prefix.map(|prefix| prefix.as_str().to_owned()).unwrap_or_default();
        // Each with whether a link was followed on the way.
        let folders = vec![(first, false)];
        let prefix = prefix.cloned();
        Box::pin(
            stream::try_unfold(folders, move |mut folders| {
                let (root, prefix) = (Arc::clone(&root), prefix.clone());
                async move {
                    let Some((path, by_link)) = folders.pop() else {
                        return Ok::<_, StorageError>(None);
                    };
                    let op = StorageOp::List;
                    let for_thread = prefix.clone();
                    let found = blocking(op, prefix.as_ref(), move || {
                        look_into(&root, &path)
                            .map_err(|error| classify(op, for_thread.as_ref(), error))
                    })
                    .await?;
                    let found = found.map(|(_, found)| found).unwrap_or_default();
                    folders.extend(found.folders.into_iter().map(|folder| (folder, by_link)));
                    if !by_link {
                        folders
                            .extend(found.linked_folders.into_iter().map(|folder| (folder, true)));
                    }
                    Ok(Some((stream::iter(found.objects.into_iter().map(Ok)), folders)))
                }
            })
            .try_flatten(),
        )
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        if is_reserved(key) {
            return Ok(());
        }
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        blocking(StorageOp::Delete, Some(key), move || {
            shared.delete(&for_thread).map_err(on_key(StorageOp::Delete, &for_thread))
        })
        .await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        let claim =
            blocking(StorageOp::Claim, Some(key), move || FsClaim::take(shared, for_thread));
        Ok(Arc::new(claim.await?))
    }
}
