//! A storage decorator that counts requests and bytes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::storage::{
    Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PartFuture, PutMode,
    ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError};

/// Counts the requests to another storage; clones share the counts.
///
/// A request counts when it is made, bytes when the request succeeds.
#[derive(Clone, Debug)]
pub struct CountingStorage {
    inner: Arc<dyn Storage>,
    tally: Arc<Mutex<Tally>>,
}

#[derive(Debug, Default)]
struct Tally {
    counts: Counts,
    by_key: BTreeMap<Key, u64>,
}

/// The requests to a [`CountingStorage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Calls of [`Storage::stat`].
    pub stats: u64,
    /// Calls of [`Storage::read`].
    pub reads: u64,
    /// Ranges in all reads.
    pub ranges: u64,
    /// Calls of [`Storage::read_whole`].
    pub whole_reads: u64,
    /// Calls of [`Storage::put`] and [`Claim::replace`].
    pub puts: u64,
    /// Calls of [`Storage::start_upload`].
    pub uploads: u64,
    /// Calls of [`Upload::put_part`].
    pub parts: u64,
    /// Calls of [`Upload::complete`].
    pub completes: u64,
    /// Calls of [`Upload::abort`].
    pub aborts: u64,
    /// Calls of [`Storage::list`].
    pub lists: u64,
    /// Calls of [`Storage::list_folder`].
    pub folder_lists: u64,
    /// Calls of [`Storage::delete`].
    pub deletes: u64,
    /// Keys in all deletes.
    pub deleted_keys: u64,
    /// Calls of [`Storage::claim`].
    pub claims: u64,
    /// Calls of [`Storage::leftovers`].
    pub leftovers: u64,
    /// Calls of [`Storage::remove_empty_folders`].
    pub folder_removals: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written by puts and parts.
    pub bytes_written: u64,
}

impl Counts {
    /// The total number of calls.
    #[must_use]
    pub fn operations(&self) -> u64 {
        let of_objects = self.stats + self.reads + self.whole_reads + self.puts;
        let of_objects = of_objects + self.lists + self.folder_lists + self.deletes;
        let of_objects = of_objects + self.claims + self.leftovers + self.folder_removals;
        of_objects + self.uploads + self.parts + self.completes + self.aborts
    }
}

impl CountingStorage {
    /// Wraps `inner` with counts of zero.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>) -> Self {
        Self { inner, tally: Arc::default() }
    }

    /// The current counts.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.tally().counts
    }

    /// The number of requests for a key: calls of `stat`, `read`, `read_whole`, `put`,
    /// `start_upload`, `claim` and `delete`, and calls on its uploads.
    #[must_use]
    pub fn requests(&self, key: &Key) -> u64 {
        self.tally().by_key.get(key).copied().unwrap_or(0)
    }

    /// The number of requests for each key, in key order.
    #[must_use]
    pub fn requests_by_key(&self) -> Vec<(Key, u64)> {
        self.tally().by_key.iter().map(|(key, &requests)| (key.clone(), requests)).collect()
    }

    /// Resets the counts to zero, and returns the old ones.
    pub fn reset(&self) -> Counts {
        std::mem::take(&mut *self.tally()).counts
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, key: &Key, counter: impl FnOnce(&mut Counts)) {
        let mut tally = self.tally();
        counter(&mut tally.counts);
        *tally.by_key.entry(key.clone()).or_default() += 1;
    }
}

#[async_trait]
impl Storage for CountingStorage {
    dcp_core::forward_storage!(inner: capabilities);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.count(key, |counts| counts.stats += 1);
        self.inner.stat(key).await
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let ranges = request.ranges.len() as u64;
        let bytes = request.ranges.iter().map(|read| read.buffer.len() as u64).sum::<u64>();
        self.count(key, |counts| {
            counts.reads += 1;
            counts.ranges += ranges;
        });
        let outcome = self.inner.read(key, request).await?;
        self.tally().counts.bytes_read += bytes;
        Ok(outcome)
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        self.count(key, |counts| counts.whole_reads += 1);
        let whole = self.inner.read_whole(key, max_bytes).await?;
        self.tally().counts.bytes_read += whole.bytes.len() as u64;
        Ok(whole)
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let bytes = payload.len();
        self.count(key, |counts| counts.puts += 1);
        let meta = self.inner.put(key, payload, mode).await?;
        self.tally().counts.bytes_written += bytes;
        Ok(meta)
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.count(key, |counts| counts.uploads += 1);
        let inner = self.inner.start_upload(key, options).await?;
        Ok(Box::new(CountingUpload { inner, storage: self.clone(), key: key.clone() }))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        self.tally().counts.lists += 1;
        self.inner.list(folder)
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        self.tally().counts.folder_lists += 1;
        self.inner.list_folder(folder)
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        {
            let mut tally = self.tally();
            tally.counts.deletes += 1;
            tally.counts.deleted_keys += keys.len() as u64;
            for key in keys {
                *tally.by_key.entry(key.clone()).or_default() += 1;
            }
        }
        self.inner.delete(keys).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.count(key, |counts| counts.claims += 1);
        let inner = self.inner.claim(key).await?;
        Ok(Arc::new(CountingClaim { inner, storage: self.clone(), key: key.clone() }))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        self.tally().counts.leftovers += 1;
        self.inner.leftovers(folder, min_age, action).await
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        self.tally().counts.folder_removals += 1;
        self.inner.remove_empty_folders(folder).await
    }
}

#[derive(Debug)]
struct CountingClaim {
    inner: Arc<dyn Claim>,
    storage: CountingStorage,
    key: Key,
}

#[async_trait]
impl Claim for CountingClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        let bytes = payload.len();
        self.storage.count(&self.key, |counts| counts.puts += 1);
        let meta = self.inner.replace(payload).await?;
        self.storage.tally().counts.bytes_written += bytes;
        Ok(meta)
    }
}

#[derive(Debug)]
struct CountingUpload {
    inner: Box<dyn Upload>,
    storage: CountingStorage,
    key: Key,
}

#[async_trait]
impl Upload for CountingUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let bytes = part.len();
        self.storage.count(&self.key, |counts| counts.parts += 1);
        let (part, storage) = (self.inner.put_part(part), self.storage.clone());
        Box::pin(async move {
            part.await?;
            storage.tally().counts.bytes_written += bytes;
            Ok(())
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        self.storage.count(&self.key, |counts| counts.completes += 1);
        self.inner.complete().await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        self.storage.count(&self.key, |counts| counts.aborts += 1);
        self.inner.abort().await
    }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::MemoryStorage;
    use crate::case::runtime;
    use dcp_core::storage::StorageExt;

    #[test]
    fn requests_and_bytes_are_counted() {
        let storage = CountingStorage::new(Arc::new(MemoryStorage::new()));
        let [a, b] = ["a", "b"].map(|name| Key::new(name).unwrap());
        runtime().block_on(async {
            storage.put(&a, "hello".into(), PutMode::Create).await.unwrap();
            storage.put(&a, "again".into(), PutMode::Create).await.unwrap_err();
            let options = UploadOptions::new(PutMode::Create, 3);
            let mut upload = storage.start_upload(&b, options.clone()).await.unwrap();
            upload.put_part("abc".into()).await.unwrap();
            upload.complete().await.unwrap();
            storage
                .start_upload(&Key::new("c").unwrap(), options)
                .await
                .unwrap()
                .abort()
                .await
                .unwrap();
            assert_eq!(storage.read_whole(&a, 5).await.unwrap().bytes, "hello");
            storage.stat(&a).await.unwrap();
            storage.read_range(&a, 3..5).await.unwrap();
            storage.read_range(&a, 3..9).await.unwrap_err();
            storage.delete(&[b.clone(), a.clone()]).await.unwrap();
            drop((storage.list(None), storage.list_folder(None)));
            storage.leftovers(None, Duration::ZERO, LeftoverAction::List).await.unwrap();
            storage.remove_empty_folders(&a).await.unwrap();
        });
        let counts = storage.counts();
        let expected = Counts {
            stats: 1,
            reads: 2,
            ranges: 2,
            whole_reads: 1,
            puts: 2,
            uploads: 2,
            parts: 1,
            completes: 1,
            aborts: 1,
            lists: 1,
            folder_lists: 1,
            deletes: 1,
            deleted_keys: 2,
            claims: 0,
            leftovers: 1,
            folder_removals: 1,
            bytes_read: 7,
            bytes_written: 8,
        };
        assert_eq!(counts, expected);
        assert_eq!(counts.operations(), 16);
        assert_eq!((storage.requests(&a), storage.requests(&b)), (7, 4));
        assert_eq!(storage.requests_by_key().len(), 3);
        assert_eq!(storage.reset(), expected);
        assert_eq!((storage.counts(), storage.requests(&a)), (Counts::default(), 0));
    }
}
