//! Joins several storages into one, for views that place data in more than one.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Capabilities, Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PutMode,
    ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};

/// Several storages, each in a folder named after its number. Supports reading only, without
/// listing.
pub(super) struct Joined {
    storages: Vec<Arc<dyn Storage>>,
}

impl Joined {
    pub(super) fn new(storages: Vec<Arc<dyn Storage>>) -> Self {
        Self { storages }
    }

    /// The joined key of `key` in the storage `number`.
    pub(super) fn key(number: usize, key: &Key) -> Option<Key> {
        Key::new(format!("{number}/{key}")).ok()
    }

    fn find(&self, op: StorageOp, key: &Key) -> Result<(&Arc<dyn Storage>, Key), StorageError> {
        let found = key.as_str().split_once('/').and_then(|(number, rest)| {
            let storage = self.storages.get(number.parse::<usize>().ok()?)?;
            Some((storage, Key::new(rest).ok()?))
        });
        found.ok_or_else(|| StorageError::new(StorageErrorKind::NotFound, op, Some(key.clone())))
    }
}

fn read_only(op: StorageOp, key: Option<&Key>) -> StorageError {
    StorageError::new(StorageErrorKind::Unsupported, op, key.cloned())
        .with_message("checkpoints that are seen as one are only read")
}

#[async_trait]
impl Storage for Joined {
    fn capabilities(&self) -> Capabilities {
        let mut all = self.storages.iter().map(|storage| storage.capabilities());
        let first = all.next().unwrap_or_default();
        let mut joined = Capabilities::none();
        joined.ranged_reads = true;
        joined.versions = true;
        joined.coalesce_gap = first.coalesce_gap;
        joined.parallelism = first.parallelism;
        all.chain([first]).fold(joined, |mut all, one| {
            all.ranged_reads &= one.ranged_reads;
            all.versions &= one.versions;
            all.coalesce_gap = all.coalesce_gap.min(one.coalesce_gap);
            all.parallelism = all.parallelism.min(one.parallelism);
            all
        })
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let (storage, inner) = self.find(StorageOp::Stat, key)?;
        Ok(storage.stat(&inner).await?.with_key(key.clone()))
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let (storage, inner) = self.find(StorageOp::Read, key)?;
        storage.read(&inner, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let (storage, inner) = self.find(StorageOp::Read, key)?;
        let whole = storage.read_whole(&inner, max_bytes).await?;
        Ok(WholeObject::new(whole.meta.with_key(key.clone()), whole.bytes))
    }

    async fn put(&self, key: &Key, _: Payload, _: PutMode) -> Result<ObjectMeta, StorageError> {
        Err(read_only(StorageOp::Put, Some(key)))
    }

    async fn start_upload(
        &self,
        key: &Key,
        _: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        Err(read_only(StorageOp::Upload, Some(key)))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let error = read_only(StorageOp::List, folder);
        Box::pin(futures_util::stream::iter([Err(error)]))
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let error = read_only(StorageOp::List, folder);
        Box::pin(futures_util::stream::iter([Err(error)]))
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        Err(read_only(StorageOp::Delete, keys.first()))
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Err(read_only(StorageOp::Claim, Some(key)))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        _: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        Err(read_only(action.op(), folder))
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        Err(read_only(StorageOp::RemoveFolders, Some(folder)))
    }
}

impl fmt::Debug for Joined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joined").field("storages", &self.storages).finish()
    }
}
