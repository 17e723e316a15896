//! Joins several storages into one, for views that place data in more than one.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Upload};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};

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
        all.fold(first, |mut all, one| {
            all.atomic_create &= one.atomic_create;
            all.durable &= one.durable;
            all.ranged_reads &= one.ranged_reads;
            all.coalesce_gap = all.coalesce_gap.min(one.coalesce_gap);
            all.parallelism = all.parallelism.min(one.parallelism);
            all
        })
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let (storage, inner) = self.find(StorageOp::Stat, key)?;
        let found = storage.stat(&inner).await?;
        Ok(ObjectMeta::new(key.clone(), found.byte_len).with_modified(found.modified))
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        let (storage, inner) = self.find(StorageOp::Read, key)?;
        storage.read(&inner, reads).await
    }

    async fn put(&self, key: &Key, _: Payload, _: PutMode) -> Result<(), StorageError> {
        Err(read_only(StorageOp::Put, Some(key)))
    }

    async fn start_upload(&self, key: &Key, _: PutMode) -> Result<Box<dyn Upload>, StorageError> {
        Err(read_only(StorageOp::Upload, Some(key)))
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        let error = read_only(StorageOp::List, prefix);
        Box::pin(futures_util::stream::iter([Err(error)]))
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        Err(read_only(StorageOp::Delete, Some(key)))
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Err(read_only(StorageOp::Claim, Some(key)))
    }
}

impl fmt::Debug for Joined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joined").field("storages", &self.storages).finish()
    }
}
