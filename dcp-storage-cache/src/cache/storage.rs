//! [`Storage`] with blocks on local disk.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use dashmap::DashMap;
use dcp_core::error::StorageOp;
use dcp_core::registry::{Access, OpenRequest};
use dcp_core::storage::{
    ObjectMeta, ObjectStream, PutMode, ReadInto, ReadOutcome, ReadRequest, Upload, UploadOptions,
    Version, WholeObject,
};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt, TryStreamExt, stream};

use super::block::BlockName;
use super::folder::CacheFolder;
use crate::blocking::blocking;

/// The number of times that an object that is replaced again and again is read from the start.
const ATTEMPTS: u32 = 16;

/// A layer of a [`StorageRegistry`](dcp_core::registry::StorageRegistry) that caches what is read
/// from remote storages.
///
/// ```
/// # use dcp_core::registry::StorageRegistry;
/// # use dcp_core::StorageError;
/// use dcp_storage_cache::{CacheFolder, cache_layer};
///
/// # fn example(storages: StorageRegistry) -> Result<StorageRegistry, StorageError> {
/// let folder = CacheFolder::new("/scratch/dcp").open()?;
/// Ok(storages.layer(cache_layer(folder)))
/// # }
/// ```
pub fn cache_layer(
    folder: CacheFolder,
) -> impl Fn(Arc<dyn Storage>, &OpenRequest) -> Arc<dyn Storage> + Send + Sync + 'static {
    move |storage, request| {
        if request.scheme() == "file" || request.access != Access::Read {
            return storage;
        }
        // One URL names a bucket at each endpoint.
        let endpoints = request.options.iter().filter(|(name, _)| name.contains("endpoint"));
        let endpoints: Vec<_> = endpoints.map(|(name, value)| format!("{name}={value}")).collect();
        let identity = format!("{} {}", request.url, endpoints.join(" "));
        Arc::new(CachedStorage::new(storage, identity, folder.clone()))
    }
}

/// A storage whose reads are served from a [`CacheFolder`] where possible; clones share it. See the
/// [crate](crate) documentation.
#[derive(Clone, Debug)]
pub struct CachedStorage(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    inner: Arc<dyn Storage>,
    /// Distinguishes storages.
    url: String,
    folder: CacheFolder,
    /// The objects that were seen, by key.
    seen: DashMap<Key, Seen>,
    from_cache: AtomicU64,
    from_storage: AtomicU64,
    warned: AtomicBool,
}

#[derive(Clone, Debug)]
struct Seen {
    version: Version,
    byte_len: u64,
}

/// The bytes that a [`CachedStorage`] has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Bytes of blocks that were in the folder.
    pub from_cache: u64,
    /// Bytes of blocks that were fetched.
    pub from_storage: u64,
}

/// One block of an object: its number, and its bytes in the object.
#[derive(Clone, Debug)]
struct Block {
    name: BlockName,
    range: Range<u64>,
}

impl CachedStorage {
    /// Caches the reads of `inner` in `folder`. The URL identifies the storage, so it is the same in
    /// every process and differs between storages; it is hashed and not stored.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, url: impl Into<String>, folder: CacheFolder) -> Self {
        Self(Arc::new(Shared {
            inner,
            url: url.into(),
            folder,
            seen: DashMap::new(),
            from_cache: AtomicU64::new(0),
            from_storage: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        }))
    }

    /// The bytes read so far, by this storage and its clones.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        CacheStats {
            from_cache: self.0.from_cache.load(Ordering::Relaxed),
            from_storage: self.0.from_storage.load(Ordering::Relaxed),
        }
    }

    /// Fetches all blocks of an object that are not in the folder.
    ///
    /// # Errors
    ///
    /// Those of [`Storage::stat`] and [`Storage::read`];
    /// [`Unsupported`](StorageErrorKind::Unsupported) when the storage has no versions.
    pub async fn prefetch(&self, key: &Key) -> Result<(), StorageError> {
        let meta = self.stat(key).await?;
        let Some(version) = meta.version else {
            return Err(StorageError::new(
                StorageErrorKind::Unsupported,
                StorageOp::Read,
                Some(key.clone()),
            )
            .with_message("the storage has no versions, so nothing is cached"));
        };
        let seen = Seen { version, byte_len: meta.byte_len };
        let block_bytes = self.0.folder.block_bytes();
        let numbers = 0..meta.byte_len.div_ceil(block_bytes);
        let blocks = numbers.map(|number| self.0.block(key, &seen, number)).collect();
        let mut found = self.0.blocks(key, &seen, blocks);
        while found.try_next().await?.is_some() {}
        Ok(())
    }
}

impl Shared {
    fn note(&self, meta: &ObjectMeta) {
        match &meta.version {
            Some(version) => {
                let seen = Seen { version: version.clone(), byte_len: meta.byte_len };
                self.seen.insert(meta.key.clone(), seen);
            }
            None => drop(self.seen.remove(&meta.key)),
        }
    }

    /// The version to read; `None` when the storage has none.
    async fn version(
        &self,
        key: &Key,
        required: Option<&Version>,
    ) -> Result<Option<Seen>, StorageError> {
        if let Some(required) = required
            && let Some(seen) = self.seen.get(key)
            && seen.version == *required
        {
            return Ok(Some(seen.clone()));
        }
        let meta = self.inner.stat(key).await?;
        self.note(&meta);
        let Some(version) = meta.version else { return Ok(None) };
        if required.is_some_and(|required| *required != version) {
            return Err(StorageError::new(
                StorageErrorKind::Changed,
                StorageOp::Read,
                Some(key.clone()),
            ));
        }
        Ok(Some(Seen { version, byte_len: meta.byte_len }))
    }

    fn block(&self, key: &Key, seen: &Seen, number: u64) -> Block {
        let block_bytes = self.folder.block_bytes();
        let name = BlockName::new(&self.url, key, &seen.version, block_bytes, number);
        let start = number.saturating_mul(block_bytes);
        let end = start.saturating_add(block_bytes).min(seen.byte_len);
        Block { name, range: start..end }
    }

    /// The bytes of blocks, in their order, with several in flight.
    fn blocks<'a>(
        self: &'a Arc<Self>,
        key: &'a Key,
        seen: &'a Seen,
        blocks: Vec<Block>,
    ) -> stream::BoxStream<'a, Result<(Range<u64>, Bytes), StorageError>> {
        let in_flight = usize::from(self.inner.capabilities().parallelism.max(1));
        let load = move |block: Block| async move {
            let range = block.range.clone();
            Ok((range, self.load(key, seen, block).await?))
        };
        stream::iter(blocks).map(load).buffered(in_flight).boxed()
    }

    /// The bytes of a block, from the folder or the storage.
    async fn load(
        self: &Arc<Self>,
        key: &Key,
        seen: &Seen,
        block: Block,
    ) -> Result<Bytes, StorageError> {
        let Block { name, range } = block;
        let too_long = || {
            StorageError::new(StorageErrorKind::Other, StorageOp::Read, Some(key.clone()))
                .with_message("there is no memory for a block")
        };
        let len = usize::try_from(range.end - range.start).map_err(|_| too_long())?;
        let (folder, wanted) = (self.folder.clone(), name.clone());
        let lookup = blocking(move || match folder.get(&wanted, len) {
            Some(bytes) => Ok(bytes),
            // Another process may have fetched the block during the wait.
            None => {
                let lock = folder.lock(&wanted);
                folder.get(&wanted, len).ok_or(lock)
            }
        });
        let lock = match lookup.await {
            Some(Ok(bytes)) => {
                self.from_cache.fetch_add(len as u64, Ordering::Relaxed);
                return Ok(bytes);
            }
            Some(Err(lock)) => Some(lock),
            None => None,
        };
        let buffer = Buffer::try_zeroed(len).ok_or_else(too_long)?;
        let request = ReadRequest::new(vec![ReadInto { byte_offset: range.start, buffer }])
            .with_if_version(Some(seen.version.clone()));
        let mut outcome = self.inner.read(key, request).await?;
        let bytes = outcome.buffers.pop().map(Buffer::freeze).unwrap_or_default();
        self.from_storage.fetch_add(len as u64, Ordering::Relaxed);
        let (shared, fetched) = (Arc::clone(self), bytes.clone());
        let stored = blocking(move || {
            let stored = shared.folder.put(&name, &fetched);
            drop(lock);
            stored
        });
        if let Some(Err(error)) = stored.await
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            let path = self.folder.path().display();
            tracing::warn!(%path, %error, "cannot cache; reading from the storage");
        }
        Ok(bytes)
    }

    async fn read(
        self: &Arc<Self>,
        key: &Key,
        seen: &Seen,
        ranges: &mut [ReadInto],
    ) -> Result<(), StorageError> {
        let block_bytes = self.folder.block_bytes();
        let mut numbers = BTreeSet::new();
        for ReadInto { byte_offset, buffer } in &*ranges {
            let end = byte_offset.saturating_add(buffer.len() as u64);
            if end > seen.byte_len && !buffer.is_empty() {
                return Err(StorageError::new(
                    StorageErrorKind::Truncated,
                    StorageOp::Read,
                    Some(key.clone()),
                )
                .with_message(format!(
                    "bytes {byte_offset}..{end} were requested, the object has {}",
                    seen.byte_len
                )));
            }
            if !buffer.is_empty() {
                numbers.extend(byte_offset / block_bytes..end.div_ceil(block_bytes));
            }
        }
        let blocks = numbers.into_iter().map(|number| self.block(key, seen, number)).collect();
        let mut found = self.blocks(key, seen, blocks);
        while let Some((range, bytes)) = found.try_next().await? {
            ranges.iter_mut().for_each(|read| copy_overlap(&range, &bytes, read));
        }
        Ok(())
    }
}

/// The error of a `stat` as one of the read that it is part of.
fn in_read(error: StorageError) -> StorageError {
    match error.kind() {
        kind @ (StorageErrorKind::NotFound | StorageErrorKind::Denied) => {
            StorageError::new(kind, StorageOp::Read, error.key().cloned()).with_source(error)
        }
        _ => error,
    }
}

/// Copies the bytes of a range that a block has.
fn copy_overlap(block: &Range<u64>, bytes: &[u8], read: &mut ReadInto) {
    let wanted = read.byte_offset..read.byte_offset.saturating_add(read.buffer.len() as u64);
    let (start, end) = (block.start.max(wanted.start), block.end.min(wanted.end));
    if start >= end {
        return;
    }
    // Both are within slices, whose lengths are `usize`.
    let at = |from: u64| (start - from) as usize..(end - from) as usize;
    if let (Some(from), Some(to)) =
        (bytes.get(at(block.start)), read.buffer.get_mut(at(wanted.start)))
    {
        to.copy_from_slice(from);
    }
}

#[async_trait]
impl Storage for CachedStorage {
    dcp_core::forward_storage!(0.inner: capabilities, list_folder, claim, leftovers, remove_empty_folders);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let meta = self.0.inner.stat(key).await?;
        self.0.note(&meta);
        Ok(meta)
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        if !self.0.inner.capabilities().versions {
            return self.0.inner.read(key, request).await;
        }
        let ReadRequest { mut ranges, if_version, .. } = request;
        let mut attempts = 1;
        loop {
            let Some(seen) = self.0.version(key, if_version.as_ref()).await.map_err(in_read)?
            else {
                let request = ReadRequest::new(ranges).with_if_version(if_version);
                return self.0.inner.read(key, request).await;
            };
            match self.0.read(key, &seen, &mut ranges).await {
                Ok(()) => {
                    let buffers = ranges.into_iter().map(|read| read.buffer).collect();
                    return Ok(ReadOutcome::new(buffers).with_version(Some(seen.version)));
                }
                // Replaced after its version was read: without a required one, the next will do.
                Err(error)
                    if error.kind() == StorageErrorKind::Changed
                        && if_version.is_none()
                        && attempts < ATTEMPTS =>
                {
                    attempts += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let whole = self.0.inner.read_whole(key, max_bytes).await?;
        self.0.note(&whole.meta);
        Ok(whole)
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let put = self.0.inner.put(key, payload, mode).await;
        self.0.seen.remove(key);
        put
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.0.seen.remove(key);
        self.0.inner.start_upload(key, options).await
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let shared = Arc::clone(&self.0);
        Box::pin(self.0.inner.list(folder).inspect_ok(move |meta| shared.note(meta)))
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let deleted = self.0.inner.delete(keys).await;
        keys.iter().for_each(|key| drop(self.0.seen.remove(key)));
        deleted
    }
}
