//! A range of a file as a storage object: each stored object is an archive of its own.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Upload};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};

/// One object, which is a range of bytes of another one. It can only be read.
#[derive(Debug)]
pub(super) struct Window {
    inner: Arc<dyn Storage>,
    within: Key,
    byte_offset: u64,
    object: ObjectMeta,
}

impl Window {
    /// `byte_len` bytes of `within` from `byte_offset` on, as an object called `name`.
    pub(super) fn new(
        inner: Arc<dyn Storage>,
        within: Key,
        byte_offset: u64,
        byte_len: u64,
        name: Key,
    ) -> Self {
        Self { inner, within, byte_offset, object: ObjectMeta::new(name, byte_len) }
    }

    fn error(kind: StorageErrorKind, operation: StorageOp, key: &Key) -> StorageError {
        StorageError::new(kind, operation, Some(key.clone()))
    }
}

#[async_trait]
impl Storage for Window {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        if *key != self.object.key {
            return Err(Self::error(StorageErrorKind::NotFound, StorageOp::Stat, key));
        }
        Ok(self.object.clone())
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        if *key != self.object.key {
            return Err(Self::error(StorageErrorKind::NotFound, StorageOp::Read, key));
        }
        let mut moved = Vec::with_capacity(reads.len());
        for read in reads {
            let end = read.byte_offset.checked_add(read.buffer.len() as u64);
            let begin = self.byte_offset.checked_add(read.byte_offset);
            let fits = end.is_some_and(|end| end <= self.object.byte_len);
            let Some(byte_offset) = begin.filter(|_| fits) else {
                return Err(Self::error(StorageErrorKind::Truncated, StorageOp::Read, key));
            };
            moved.push(ReadInto { byte_offset, ..read });
        }
        self.inner.read(&self.within, moved).await
    }

    async fn put(&self, key: &Key, _: Payload, _: PutMode) -> Result<(), StorageError> {
        Err(Self::error(StorageErrorKind::Unsupported, StorageOp::Put, key))
    }

    async fn start_upload(&self, key: &Key, _: PutMode) -> Result<Box<dyn Upload>, StorageError> {
        Err(Self::error(StorageErrorKind::Unsupported, StorageOp::Put, key))
    }

    fn list(&self, _: Option<&Key>) -> ObjectStream {
        Box::pin(futures_util::stream::iter([Ok(self.object.clone())]))
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        Err(Self::error(StorageErrorKind::Unsupported, StorageOp::Delete, key))
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Err(Self::error(StorageErrorKind::Unsupported, StorageOp::Claim, key))
    }
}
