//! A place that is not there yet, as a dry run sees it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Capabilities, Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PutMode,
    ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};

/// Has nothing in it, and takes nothing.
#[derive(Debug)]
pub(crate) struct AbsentStorage;

fn nothing(op: StorageOp, key: &Key) -> StorageError {
    StorageError::new(StorageErrorKind::NotFound, op, Some(key.clone()))
}

#[async_trait]
impl Storage for AbsentStorage {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::none();
        capabilities.listable = true;
        capabilities.complete_listing = true;
        capabilities
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        Err(nothing(StorageOp::Stat, key))
    }

    async fn read(&self, key: &Key, _: ReadRequest) -> Result<ReadOutcome, StorageError> {
        Err(nothing(StorageOp::Read, key))
    }

    async fn read_whole(&self, key: &Key, _: u64) -> Result<WholeObject, StorageError> {
        Err(nothing(StorageOp::Read, key))
    }

    async fn put(
        &self,
        key: &Key,
        _payload: Payload,
        _mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        Err(nothing(StorageOp::Put, key))
    }

    async fn start_upload(
        &self,
        key: &Key,
        _options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        Err(nothing(StorageOp::Put, key))
    }

    fn list(&self, _folder: Option<&Key>) -> ObjectStream {
        Box::pin(futures_util::stream::empty())
    }

    fn list_folder(&self, _folder: Option<&Key>) -> FolderStream {
        Box::pin(futures_util::stream::empty())
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        keys.first().map_or(Ok(()), |key| Err(nothing(StorageOp::Delete, key)))
    }

    async fn claim(&self, _: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Ok(Arc::new(Self))
    }

    async fn leftovers(
        &self,
        _: Option<&Key>,
        _: Duration,
        _: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        Ok(Vec::new())
    }

    async fn remove_empty_folders(&self, _: &Key) -> Result<(), StorageError> {
        Ok(())
    }
}

#[async_trait]
impl Claim for AbsentStorage {
    async fn replace(&self, _payload: Payload) -> Result<ObjectMeta, StorageError> {
        Err(StorageError::new(StorageErrorKind::NotFound, StorageOp::Put, None))
    }
}
