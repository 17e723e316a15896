//! A storage whose names and lengths are known.

use std::sync::Arc;

use async_trait::async_trait;

use super::listing::Listing;
use super::streams::Objects;
use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::key::Key;
use crate::memory::Buffer;
use crate::payload::Payload;
use crate::storage::{
    Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Storage, Upload,
};

/// A storage to read, whose names and lengths are those of a [`Listing`]: asking for one costs no
/// request, and neither do small files that were read whole to recognize the folder. Where the listing may lack a file ([`Listing::is_complete`]), the storage is asked for
/// files that are not listed.
///
/// What is written goes to the storage, and the listing does not change with it.
#[derive(Debug)]
pub struct ListedStorage {
    inner: Arc<dyn Storage>,
    listing: Arc<Listing>,
}

impl ListedStorage {
    /// `inner`, which was listed.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, listing: Arc<Listing>) -> Self {
        Self { inner, listing }
    }
}

/// The bytes that a read asks for, where they are all there.
fn inside<'a>(read: &ReadInto, bytes: &'a [u8]) -> Option<&'a [u8]> {
    let begin = usize::try_from(read.byte_offset).ok()?;
    bytes.get(begin..begin.checked_add(read.buffer.len())?)
}

#[async_trait]
impl Storage for ListedStorage {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        match self.listing.get(key) {
            Some(meta) => Ok(meta.clone()),
            None if self.listing.is_complete() => Err(StorageError::new(
                StorageErrorKind::NotFound,
                StorageOp::Stat,
                Some(key.clone()),
            )),
            None => self.inner.stat(key).await,
        }
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        let (known, len) = (self.listing.peeked(key), self.listing.get(key).map(|m| m.byte_len));
        if let Some(bytes) = known.filter(|bytes| len == Some(bytes.len() as u64))
            && reads.iter().all(|read| inside(read, bytes).is_some())
        {
            let filled = reads.into_iter().map(|mut read| {
                if let Some(range) = inside(&read, bytes) {
                    read.buffer.copy_from_slice(range);
                }
                read.buffer
            });
            return Ok(filled.collect());
        }
        self.inner.read(key, reads).await
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError> {
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.inner.start_upload(key, mode).await
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        if self.listing.is_truncated() || !self.listing.is_listed() {
            return self.inner.list(prefix);
        }
        let below = |meta: &&ObjectMeta| prefix.is_none_or(|prefix| meta.key.is_under(prefix));
        let objects = self.listing.objects().iter().filter(below);
        Box::pin(Objects::from(objects.cloned().map(Ok).collect::<Vec<_>>()))
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        self.inner.delete(key).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.inner.claim(key).await
    }
}
