//! A range of a file as a storage object: each stored object is an archive of its own.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Capabilities, Claim, FolderEntry, FolderStream, Leftover, LeftoverAction, ObjectMeta,
    ObjectStream, PutMode, ReadInto, ReadOutcome, ReadRequest, StorageExt as _, Upload,
    UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};

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
        let mut capabilities = self.inner.capabilities();
        capabilities.writable = false;
        capabilities.listable = true;
        capabilities.claims = false;
        capabilities
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        if *key != self.object.key {
            return Err(Self::error(StorageErrorKind::NotFound, StorageOp::Stat, key));
        }
        Ok(self.object.clone())
    }

    async fn read(&self, key: &Key, mut request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        if *key != self.object.key {
            return Err(Self::error(StorageErrorKind::NotFound, StorageOp::Read, key));
        }
        for read in &mut request.ranges {
            let ReadInto { byte_offset, buffer } = read;
            let end = byte_offset.checked_add(buffer.len() as u64);
            let begin = self.byte_offset.checked_add(*byte_offset);
            let fits = end.is_some_and(|end| end <= self.object.byte_len);
            let Some(begin) = begin.filter(|_| fits) else {
                return Err(Self::error(StorageErrorKind::Truncated, StorageOp::Read, key));
            };
            read.byte_offset = begin;
        }
        self.inner.read(&self.within, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        if *key != self.object.key {
            return Err(Self::error(StorageErrorKind::NotFound, StorageOp::Read, key));
        }
        if self.object.byte_len > max_bytes {
            return Err(Self::error(StorageErrorKind::TooLarge, StorageOp::Read, key));
        }
        let end = self.byte_offset.saturating_add(self.object.byte_len);
        let bytes = self.inner.read_range(&self.within, self.byte_offset..end).await?;
        Ok(WholeObject::new(self.object.clone(), bytes))
    }

    async fn put(&self, key: &Key, _: Payload, _: PutMode) -> Result<ObjectMeta, StorageError> {
        Err(Self::error(StorageErrorKind::Unsupported, StorageOp::Put, key))
    }

    async fn start_upload(
        &self,
        key: &Key,
        _: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        Err(Self::error(StorageErrorKind::Unsupported, StorageOp::Upload, key))
    }

    fn list(&self, _: Option<&Key>) -> ObjectStream {
        Box::pin(futures_util::stream::iter([Ok(self.object.clone())]))
    }

    fn list_folder(&self, _: Option<&Key>) -> FolderStream {
        Box::pin(futures_util::stream::iter([Ok(FolderEntry::Object(self.object.clone()))]))
    }

    async fn delete(&self, _: &[Key]) -> Result<(), StorageError> {
        Err(Self::error(StorageErrorKind::Unsupported, StorageOp::Delete, &self.object.key))
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Err(Self::error(StorageErrorKind::Unsupported, StorageOp::Claim, key))
    }

    async fn leftovers(
        &self,
        _: Option<&Key>,
        _: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        let op = action.op();
        Err(Self::error(StorageErrorKind::Unsupported, op, &self.object.key))
    }

    async fn remove_empty_folders(&self, _: &Key) -> Result<(), StorageError> {
        Ok(())
    }
}
