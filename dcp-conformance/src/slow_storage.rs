//! A storage decorator that delays operations.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::storage::{
    Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PartFuture, PutMode,
    ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError};
use futures_util::{StreamExt, stream};
use tokio::time::sleep;

/// Delays every call to another storage: by a fixed latency, and optionally by a time per byte.
/// Delays of concurrent calls overlap, as on a network.
///
/// Needs a tokio runtime with its timer.
#[derive(Clone, Debug)]
pub struct SlowStorage {
    inner: Arc<dyn Storage>,
    pace: Pace,
}

#[derive(Clone, Copy, Debug)]
struct Pace {
    latency: Duration,
    bytes_per_second: Option<u64>,
}

impl Pace {
    async fn wait(self, bytes: u64) {
        let transfer = match self.bytes_per_second {
            Some(rate) => Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64),
            None => Duration::ZERO,
        };
        sleep(self.latency + transfer).await;
    }
}

impl SlowStorage {
    /// Delays every call to `inner` by `latency`.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, latency: Duration) -> Self {
        Self { inner, pace: Pace { latency, bytes_per_second: None } }
    }

    /// Also delays calls in proportion to their bytes.
    #[must_use]
    pub fn bytes_per_second(mut self, bytes_per_second: u64) -> Self {
        self.pace.bytes_per_second = Some(bytes_per_second);
        self
    }
}

#[async_trait]
impl Storage for SlowStorage {
    dcp_core::forward_storage!(inner: capabilities);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.pace.wait(0).await;
        self.inner.stat(key).await
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        self.pace.wait(request.ranges.iter().map(|read| read.buffer.len() as u64).sum()).await;
        self.inner.read(key, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let whole = self.inner.read_whole(key, max_bytes).await;
        self.pace.wait(whole.as_ref().map_or(0, |whole| whole.bytes.len() as u64)).await;
        whole
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.pace.wait(payload.len()).await;
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.pace.wait(0).await;
        let inner = self.inner.start_upload(key, options).await?;
        Ok(Box::new(SlowUpload { inner, pace: self.pace }))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let (inner, pace) = (Arc::clone(&self.inner), self.pace);
        let folder = folder.cloned();
        let listing = async move {
            pace.wait(0).await;
            inner.list(folder.as_ref())
        };
        Box::pin(stream::once(listing).flatten())
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let (inner, pace) = (Arc::clone(&self.inner), self.pace);
        let folder = folder.cloned();
        let listing = async move {
            pace.wait(0).await;
            inner.list_folder(folder.as_ref())
        };
        Box::pin(stream::once(listing).flatten())
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        self.pace.wait(0).await;
        self.inner.delete(keys).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.pace.wait(0).await;
        let inner = self.inner.claim(key).await?;
        Ok(Arc::new(SlowClaim { inner, pace: self.pace }))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        self.pace.wait(0).await;
        self.inner.leftovers(folder, min_age, action).await
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        self.pace.wait(0).await;
        self.inner.remove_empty_folders(folder).await
    }
}

#[derive(Debug)]
struct SlowClaim {
    inner: Arc<dyn Claim>,
    pace: Pace,
}

#[async_trait]
impl Claim for SlowClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        self.pace.wait(payload.len()).await;
        self.inner.replace(payload).await
    }
}

#[derive(Debug)]
struct SlowUpload {
    inner: Box<dyn Upload>,
    pace: Pace,
}

#[async_trait]
impl Upload for SlowUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let (len, pace) = (part.len(), self.pace);
        let part = self.inner.put_part(part);
        Box::pin(async move {
            pace.wait(len).await;
            part.await
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        self.pace.wait(0).await;
        self.inner.complete().await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        self.pace.wait(0).await;
        self.inner.abort().await
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::MemoryStorage;

    #[test]
    fn calls_wait_for_latency_and_bytes_side_by_side() {
        let storage = SlowStorage::new(Arc::new(MemoryStorage::new()), Duration::from_millis(40))
            .bytes_per_second(1000);
        let keys = ["a", "b", "c"].map(|name| Key::new(name).unwrap());
        // The clock stands still but for waits, whatever the machine does.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        let taken = runtime.block_on(async {
            let begun = Instant::now();
            let puts = keys
                .iter()
                .map(|key| storage.put(key, Payload::from(vec![0; 60]), PutMode::Create));
            futures_util::future::try_join_all(puts).await.unwrap();
            begun.elapsed()
        });
        assert!(taken >= Duration::from_millis(100), "{taken:?}");
        assert!(taken < Duration::from_millis(200), "{taken:?} is as long as one after another");
    }
}
