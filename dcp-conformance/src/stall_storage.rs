//! A storage decorator that stops a caller at a chosen operation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::storage::{
    Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PartFuture, PutMode,
    ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError};
use futures_util::{StreamExt, stream};

/// Passes operations to another storage; one of them waits for [`resume`](Self::resume).
///
/// Operations are counted as by [`FaultStorage`](crate::FaultStorage). A test can stop one of two
/// callers before each of its steps and let the other continue. Needs no runtime: a stopped caller
/// is a pending future.
#[derive(Clone, Debug)]
pub struct StallStorage {
    inner: Arc<dyn Storage>,
    stop_at: u64,
    gate: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    begun: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    reached: bool,
    open: bool,
    /// Stopped callers, and callers of [`stopped`](Self::stopped).
    waiting: Vec<Waker>,
    watching: Vec<Waker>,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn pass(&self, stop_at: u64) {
        if self.begun.fetch_add(1, Ordering::SeqCst) + 1 != stop_at {
            return;
        }
        {
            let mut state = self.state();
            state.reached = true;
            state.watching.drain(..).for_each(Waker::wake);
        }
        std::future::poll_fn(|context| {
            let mut state = self.state();
            if state.open {
                return Poll::Ready(());
            }
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl StallStorage {
    /// Stops the caller before operation number `operation`, counted from 1.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, operation: u64) -> Self {
        Self { inner, stop_at: operation, gate: Arc::default() }
    }

    /// Lets the operation continue.
    pub fn resume(&self) {
        let mut state = self.gate.state();
        state.open = true;
        state.waiting.drain(..).for_each(Waker::wake);
    }

    /// Waits until a caller is stopped.
    pub async fn stopped(&self) {
        std::future::poll_fn(|context| {
            let mut state = self.gate.state();
            if state.reached {
                return Poll::Ready(());
            }
            state.watching.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// The number of operations begun, including the stopped one.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.gate.begun.load(Ordering::SeqCst)
    }

    async fn pass(&self) {
        self.gate.pass(self.stop_at).await;
    }
}

#[async_trait]
impl Storage for StallStorage {
    dcp_core::forward_storage!(inner: capabilities);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.pass().await;
        self.inner.stat(key).await
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        self.pass().await;
        self.inner.read(key, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        self.pass().await;
        self.inner.read_whole(key, max_bytes).await
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.pass().await;
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.pass().await;
        let inner = self.inner.start_upload(key, options).await?;
        Ok(Box::new(StallUpload { inner, storage: self.clone() }))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let (storage, folder) = (self.clone(), folder.cloned());
        let listing = async move {
            storage.pass().await;
            storage.inner.list(folder.as_ref())
        };
        Box::pin(stream::once(listing).flatten())
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let (storage, folder) = (self.clone(), folder.cloned());
        let listing = async move {
            storage.pass().await;
            storage.inner.list_folder(folder.as_ref())
        };
        Box::pin(stream::once(listing).flatten())
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        self.pass().await;
        self.inner.delete(keys).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.pass().await;
        let inner = self.inner.claim(key).await?;
        Ok(Arc::new(StallClaim { inner, storage: self.clone() }))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        self.pass().await;
        self.inner.leftovers(folder, min_age, action).await
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        self.pass().await;
        self.inner.remove_empty_folders(folder).await
    }
}

#[derive(Debug)]
struct StallClaim {
    inner: Arc<dyn Claim>,
    storage: StallStorage,
}

#[async_trait]
impl Claim for StallClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        self.storage.pass().await;
        self.inner.replace(payload).await
    }
}

#[derive(Debug)]
struct StallUpload {
    inner: Box<dyn Upload>,
    storage: StallStorage,
}

#[async_trait]
impl Upload for StallUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let (part, storage) = (self.inner.put_part(part), self.storage.clone());
        Box::pin(async move {
            storage.pass().await;
            part.await
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        self.storage.pass().await;
        self.inner.complete().await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        self.storage.pass().await;
        self.inner.abort().await
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Context;

    use super::*;
    use crate::MemoryStorage;

    #[test]
    fn a_stopped_operation_has_no_effect_before_it_is_resumed() {
        let memory = Arc::new(MemoryStorage::new());
        let storage = StallStorage::new(memory.clone(), 2);
        let key = Key::new("a").unwrap();
        let mut steps = pin!(async {
            storage.put(&key, "1".into(), PutMode::Create).await.unwrap();
            storage.put(&key, "2".into(), PutMode::Overwrite).await.unwrap();
        });
        let held = || {
            let read = memory.read_whole(&key, 1);
            futures_util::FutureExt::now_or_never(read).unwrap().unwrap().bytes
        };
        let mut context = Context::from_waker(Waker::noop());
        let mut stopped = pin!(storage.stopped());
        assert!(stopped.as_mut().poll(&mut context).is_pending());
        assert!(steps.as_mut().poll(&mut context).is_pending());
        assert!(stopped.as_mut().poll(&mut context).is_ready());
        assert!(steps.as_mut().poll(&mut context).is_pending());
        assert_eq!((held(), storage.operations()), ("1".into(), 2));
        storage.resume();
        assert!(steps.as_mut().poll(&mut context).is_ready());
        assert_eq!(held(), "2");
    }
}
