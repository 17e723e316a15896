//! A storage whose requests are recorded.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::registry::OpenRequest;
use dcp_core::storage::{
    Capabilities, Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream,
    PartFuture, PutMode, ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Rank, Storage, StorageError};
use futures_core::Stream;

use crate::event::{FILE, REQUEST};
use crate::recorder::{TraceRecorder, TraceSpan};

impl TraceRecorder {
    /// Wraps a storage so that its requests are recorded as those of `rank`.
    #[must_use]
    pub fn storage(&self, rank: Rank, inner: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Arc::new(TracedStorage::new(self.clone(), rank, inner))
    }

    /// The layer of a registry whose storages record their requests as those of `rank`.
    ///
    /// ```
    /// # use dcp_core::registry::StorageRegistry;
    /// # let recorder = dcp_trace::TraceRecorder::to(std::io::sink());
    /// let storages = StorageRegistry::empty().layer(recorder.layer(0));
    /// # drop(storages);
    /// ```
    pub fn layer(
        &self,
        rank: Rank,
    ) -> impl Fn(Arc<dyn Storage>, &OpenRequest) -> Arc<dyn Storage> + Send + Sync + 'static {
        let recorder = self.clone();
        move |storage, _| recorder.storage(rank, storage)
    }
}

/// Records the calls of a storage, from the call until its result. A call that is dropped has the
/// argument `outcome: canceled`.
#[derive(Debug)]
pub(crate) struct TracedStorage {
    recorder: TraceRecorder,
    rank: Rank,
    inner: Arc<dyn Storage>,
}

impl TracedStorage {
    pub(crate) fn new(recorder: TraceRecorder, rank: Rank, inner: Arc<dyn Storage>) -> Self {
        Self { recorder, rank, inner }
    }

    fn request(&self, name: &str, key: Option<&Key>) -> TraceSpan {
        request(&self.recorder, self.rank, REQUEST, name, key)
    }
}

fn request(
    recorder: &TraceRecorder,
    rank: Rank,
    category: &str,
    name: &str,
    key: Option<&Key>,
) -> TraceSpan {
    let span = recorder.request(rank, category, name).with("outcome", "canceled");
    match key {
        Some(key) => span.with("file", key.as_str()),
        None => span,
    }
}

/// Ends a span with the outcome of its call.
fn done<T>(mut span: TraceSpan, result: Result<T, StorageError>) -> Result<T, StorageError> {
    match &result {
        Ok(_) => span.set("outcome", "ok"),
        Err(error) => span.set("outcome", format!("{:?}", error.kind())),
    }
    result
}

#[async_trait]
impl Storage for TracedStorage {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let span = self.request("stat", Some(key));
        done(span, self.inner.stat(key).await)
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let bytes: usize = request.ranges.iter().map(|range| range.buffer.len()).sum();
        let span = self.request("read", Some(key)).with("bytes", bytes);
        let span = span.with("ranges", request.ranges.len());
        done(span, self.inner.read(key, request).await)
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let mut span = self.request("read whole", Some(key));
        let read = self.inner.read_whole(key, max_bytes).await;
        if let Ok(read) = &read {
            span.set("bytes", read.bytes.len());
        }
        done(span, read)
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let span = self.request("put", Some(key)).with("bytes", payload.len());
        done(span, self.inner.put(key, payload, mode).await)
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let file = request(&self.recorder, self.rank, FILE, key.as_str(), Some(key));
        let span = self.request("start upload", Some(key));
        let upload = done(span, self.inner.start_upload(key, options).await)?;
        Ok(Box::new(TracedUpload {
            recorder: self.recorder.clone(),
            rank: self.rank,
            key: key.clone(),
            file,
            bytes: 0,
            inner: upload,
        }))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let span = self.request("list", folder);
        Box::pin(TracedStream { inner: self.inner.list(folder), span: Some(span), entries: 0 })
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let span = self.request("list folder", folder);
        Box::pin(TracedStream {
            inner: self.inner.list_folder(folder),
            span: Some(span),
            entries: 0,
        })
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let span = self.request("delete", keys.first()).with("files", keys.len());
        done(span, self.inner.delete(keys).await)
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let span = self.request("claim", Some(key));
        let inner = done(span, self.inner.claim(key).await)?;
        let (recorder, rank) = (self.recorder.clone(), self.rank);
        Ok(Arc::new(TracedClaim { recorder, rank, key: key.clone(), inner }))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        let name = match action {
            LeftoverAction::List => "list leftovers",
            LeftoverAction::Remove => "remove leftovers",
        };
        let span = self.request(name, folder);
        done(span, self.inner.leftovers(folder, min_age, action).await)
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        let span = self.request("remove empty folders", Some(folder));
        done(span, self.inner.remove_empty_folders(folder).await)
    }
}

#[derive(Debug)]
struct TracedUpload {
    recorder: TraceRecorder,
    rank: Rank,
    key: Key,
    /// From the start until the object is complete.
    file: TraceSpan,
    bytes: u64,
    inner: Box<dyn Upload>,
}

#[async_trait]
impl Upload for TracedUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let (bytes, offset) = (part.len(), self.bytes);
        self.bytes = self.bytes.saturating_add(bytes);
        let (recorder, rank, key) = (self.recorder.clone(), self.rank, self.key.clone());
        let part = self.inner.put_part(part);
        Box::pin(async move {
            // From the first poll: a part may wait for its turn in the caller.
            let span = request(&recorder, rank, REQUEST, "put part", Some(&key));
            let span = span.with("bytes", bytes).with("offset", offset);
            done(span, part.await)
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let span = request(&self.recorder, self.rank, REQUEST, "complete", Some(&self.key));
        let file = self.file.with("bytes", self.bytes);
        done(file, done(span, self.inner.complete().await))
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        let span = request(&self.recorder, self.rank, REQUEST, "abort", Some(&self.key));
        let aborted = done(span, self.inner.abort().await);
        self.file.with("outcome", "aborted");
        aborted
    }
}

#[derive(Debug)]
struct TracedClaim {
    recorder: TraceRecorder,
    rank: Rank,
    key: Key,
    inner: Arc<dyn Claim>,
}

#[async_trait]
impl Claim for TracedClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        let span = request(&self.recorder, self.rank, REQUEST, "replace", Some(&self.key));
        let span = span.with("bytes", payload.len());
        done(span, self.inner.replace(payload).await)
    }
}

/// A listing, recorded until its last entry.
struct TracedStream<S> {
    inner: S,
    span: Option<TraceSpan>,
    entries: u64,
}

impl<T, S> Stream for TracedStream<S>
where
    S: Stream<Item = Result<T, StorageError>> + Unpin,
{
    type Item = Result<T, StorageError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let entry = Pin::new(&mut self.inner).poll_next(context);
        let outcome = match &entry {
            Poll::Ready(Some(Ok(_))) => {
                self.entries += 1;
                return entry;
            }
            Poll::Pending => return entry,
            Poll::Ready(None) => "ok".to_owned(),
            Poll::Ready(Some(Err(error))) => format!("{:?}", error.kind()),
        };
        let entries = self.entries;
        if let Some(span) = self.span.take() {
            drop(span.with("entries", entries).with("outcome", outcome));
        }
        entry
    }
}
