//! A place that is not there yet, as a dry run sees it.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Upload};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};

/// Has nothing in it, and takes nothing.
#[derive(Debug)]
pub(crate) struct AbsentStorage;

fn nothing(op: StorageOp, key: &Key) -> StorageError {
    StorageError::new(StorageErrorKind::NotFound, op, Some(key.clone()))
}

#[async_trait]
impl Storage for AbsentStorage {
    fn capabilities(&self) -> Capabilities {
        Capabilities::none()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        Err(nothing(StorageOp::Stat, key))
    }

    async fn read(&self, key: &Key, _reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        Err(nothing(StorageOp::Read, key))
    }

    async fn put(&self, key: &Key, _payload: Payload, _mode: PutMode) -> Result<(), StorageError> {
        Err(nothing(StorageOp::Put, key))
    }

    async fn start_upload(
        &self,
        key: &Key,
        _mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        Err(nothing(StorageOp::Put, key))
    }

    fn list(&self, _prefix: Option<&Key>) -> ObjectStream {
        Box::pin(futures_util::stream::empty())
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        Err(nothing(StorageOp::Delete, key))
    }

    async fn claim(&self, _: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Ok(Arc::new(Self))
    }
}

#[async_trait]
impl Claim for AbsentStorage {
    async fn replace(&self, _payload: Payload) -> Result<(), StorageError> {
        Err(StorageError::new(StorageErrorKind::NotFound, StorageOp::Put, None))
    }
}
