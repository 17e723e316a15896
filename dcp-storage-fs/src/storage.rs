//! [`Storage`] on a folder.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Capabilities, Claim, FolderEntry, FolderStream, Leftover, LeftoverAction, ObjectMeta,
    ObjectStream, PutMode, ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::{TryStreamExt, stream};

use crate::blocking::blocking;
use crate::error::{classify, on_key};
use crate::folder;
use crate::folder_listing::{is_linked, look_into};
use crate::leftovers;
use crate::lock::FsClaim;
use crate::root::Root;
use crate::shared::{Shared, is_reserved};
use crate::upload::FsUpload;

/// Objects as files below a root folder; clones share it. See the [crate](crate) documentation.
#[derive(Clone, Debug)]
pub struct FsStorage(Arc<Shared>);

impl FsStorage {
    pub(crate) fn new(shared: Shared) -> Self {
        Self(Arc::new(shared))
    }

    /// The root folder, unresolved.
    #[must_use]
    pub fn root(&self) -> &Path {
        self.0.root.path()
    }
}

#[async_trait]
impl Storage for FsStorage {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::none();
        capabilities.writable = true;
        capabilities.listable = true;
        capabilities.atomic_create = true;
        capabilities.claims = true;
        capabilities.versions = true;
        capabilities.durable = self.0.sync;
        capabilities.ranged_reads = true;
        capabilities.blocking = true;
        // A page, which the system reads anyway. A larger gap is faster on spinning disks, but many
        // ranks that read their columns share one file server.
        capabilities.coalesce_gap = 4 << 10;
        capabilities.parallelism = self.0.parallelism;
        capabilities
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        blocking(StorageOp::Stat, Some(key), move || shared.stat(StorageOp::Stat, &for_thread))
            .await
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        refuse_own_files(key)?;
        crate::read::read(Arc::clone(&self.0.root), key, request, self.0.parallelism).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        refuse_own_files(key)?;
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        blocking(StorageOp::Read, Some(key), move || {
            crate::read::read_whole(&shared.root, &for_thread, max_bytes)
        })
        .await
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        refuse_update(StorageOp::Put, key, &mode)?;
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        blocking(StorageOp::Put, Some(key), move || {
            let (op, key) = (StorageOp::Put, &for_thread);
            let temp = shared.create_temp(op, key)?;
            temp.write(&payload).map_err(on_key(op, key))?;
            shared.publish(op, key, temp, &mode)
        })
        .await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let (mode, permissions) = (options.mode, options.permissions);
        refuse_update(StorageOp::Upload, key, &mode)?;
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        let is_new = mode == PutMode::Create;
        let temp = blocking(StorageOp::Upload, Some(key), move || {
            let (op, key) = (StorageOp::Upload, &for_thread);
            match shared.stat(op, key) {
                Ok(_) if is_new => {
                    let kind = StorageErrorKind::AlreadyExists;
                    Err(StorageError::new(kind, op, Some(key.clone())))
                }
                Err(error) if error.kind() != StorageErrorKind::NotFound => Err(error),
                _ => shared.create_temp_with(op, key, permissions),
            }
        })
        .await?;
        Ok(Box::new(FsUpload::new(Arc::clone(&self.0), key.clone(), mode, temp)))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let root = Arc::clone(&self.0.root);
        let first = folder.map(|folder| folder.as_str().to_owned()).unwrap_or_default();
        // Each with whether a link was followed on the way.
        let folders = vec![(first, false)];
        let folder = folder.cloned();
        Box::pin(
            stream::try_unfold(folders, move |mut folders| {
                let (root, folder) = (Arc::clone(&root), folder.clone());
                async move {
                    let Some((path, by_link)) = folders.pop() else {
                        return Ok::<_, StorageError>(None);
                    };
                    let op = StorageOp::List;
                    let for_thread = folder.clone();
                    let found = blocking(op, folder.as_ref(), move || {
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

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let (shared, folder) = (Arc::clone(&self.0), folder.cloned());
        let listing = async move {
            let op = StorageOp::List;
            let for_thread = folder.clone();
            let entries = blocking(op, folder.as_ref(), move || {
                let path = for_thread.as_ref().map_or("", Key::as_str);
                list_entries(&shared.root, path)
                    .map_err(|error| classify(op, for_thread.as_ref(), error))
            });
            Ok::<_, StorageError>(stream::iter(entries.await?.into_iter().map(Ok)))
        };
        Box::pin(stream::once(listing).try_flatten())
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let keys = keys.iter().filter(|key| !is_reserved(key)).cloned().collect::<Vec<_>>();
        if keys.is_empty() {
            return Ok(());
        }
        let (shared, first) = (Arc::clone(&self.0), keys.first().cloned());
        blocking(StorageOp::Delete, first.as_ref(), move || shared.delete(&keys)).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let (shared, for_thread) = (Arc::clone(&self.0), key.clone());
        let claim =
            blocking(StorageOp::Claim, Some(key), move || FsClaim::take(shared, for_thread));
        Ok(Arc::new(claim.await?))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        let Shared { root, sync, .. } = &*self.0;
        let (root, sync, folder) = (Arc::clone(root), *sync, folder.cloned());
        let op = action.op();
        let for_thread = folder.clone();
        blocking(op, folder.as_ref(), move || {
            let path = for_thread.as_ref().map_or("", Key::as_str);
            leftovers::find(&root, path, min_age, action, sync)
                .map_err(|error| classify(op, for_thread.as_ref(), error))
        })
        .await
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        let Shared { root, sync, .. } = &*self.0;
        let (root, sync, for_thread) = (Arc::clone(root), *sync, folder.clone());
        let op = StorageOp::RemoveFolders;
        blocking(op, Some(folder), move || {
            folder::remove_empty(&root, for_thread.as_str(), sync)
                .map_err(|error| classify(op, Some(&for_thread), error))
        })
        .await
    }
}

/// Fails for the storage's own files, which are no objects.
fn refuse_own_files(key: &Key) -> Result<(), StorageError> {
    if is_reserved(key) {
        let kind = StorageErrorKind::NotFound;
        return Err(StorageError::new(kind, StorageOp::Read, Some(key.clone())));
    }
    Ok(())
}

/// A file system cannot compare a version and rename in one step.
fn refuse_update(op: StorageOp, key: &Key, mode: &PutMode) -> Result<(), StorageError> {
    match mode {
        PutMode::Create | PutMode::Overwrite => Ok(()),
        _ => Err(StorageError::new(StorageErrorKind::Unsupported, op, Some(key.clone()))
            .with_message("a file system has no conditional writes; claim the object instead")),
    }
}

/// The entries of one folder. A link to a folder is one where [`Storage::list`] follows it.
fn list_entries(root: &Root, path: &str) -> io::Result<Vec<FolderEntry>> {
    let Some((_, found)) = look_into(root, path)? else { return Ok(Vec::new()) };
    let objects = found.objects.into_iter().map(FolderEntry::Object);
    let linked = if is_linked(root, path)? { Vec::new() } else { found.linked_folders };
    let folders = found.folders.into_iter().chain(linked);
    let folders = folders.filter_map(|folder| Key::new(folder).ok()).map(FolderEntry::Folder);
    Ok(objects.chain(folders).collect())
}
