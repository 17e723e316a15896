//! Uploads of storages that take whole objects alone.

use async_trait::async_trait;

use super::{ObjectMeta, PartFuture, PutMode, Storage, Upload};
use crate::error::StorageError;
use crate::names::key::Key;
use crate::tensors::payload::Payload;

/// An upload that keeps its parts in memory, and puts them as one object, for a storage that takes whole
/// objects alone.
#[derive(Debug)]
pub struct BufferedUpload<S> {
    storage: S,
    key: Key,
    mode: PutMode,
    bytes: Vec<u8>,
}

impl<S: Storage> BufferedUpload<S> {
    /// An upload to `storage`, which takes the object by its [`put`](Storage::put).
    #[must_use]
    pub fn new(storage: S, key: Key, mode: PutMode) -> Self {
        Self { storage, key, mode, bytes: Vec::new() }
    }
}

#[async_trait]
impl<S: Storage> Upload for BufferedUpload<S> {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        // Now and not in the future: the order of calls is that of parts.
        part.pieces().iter().for_each(|piece| self.bytes.extend_from_slice(piece));
        Box::pin(std::future::ready(Ok(())))
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let Self { storage, key, mode, bytes } = *self;
        storage.put(&key, bytes.into(), mode).await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        Ok(())
    }
}
