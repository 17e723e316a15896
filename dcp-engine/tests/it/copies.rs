//! Tensor bytes go from memory to the storage and back without a copy in between.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use dcp_conformance::MemoryStorage;
use dcp_core::storage::{
    ObjectMeta, PartFuture, PutMode, ReadOutcome, ReadRequest, Upload, UploadOptions,
};
use dcp_core::{DType, Key, Payload, StateDict, Storage, StorageError, Tensor};
use dcp_engine::{Loader, Saver};
use dcp_formats::dcp::{DcpReader, DcpWriter};

use crate::harness::block_on;

/// A storage that notes which memory it is handed, and may hold it for a while.
#[derive(Clone, Debug)]
pub(crate) struct Watching {
    inner: Arc<dyn Storage>,
    written: Arc<Mutex<Vec<Range<usize>>>>,
    filled: Arc<Mutex<Vec<Range<usize>>>>,
    /// How often a part lets others run before it is written.
    yields: u32,
}

fn addresses(bytes: &[u8]) -> Range<usize> {
    let start = bytes.as_ptr().addr();
    start..start + bytes.len()
}

impl Watching {
    pub(crate) fn new(inner: Arc<dyn Storage>, yields: u32) -> Self {
        Self { inner, written: Arc::default(), filled: Arc::default(), yields }
    }

    fn note(&self, payload: &Payload) {
        let pieces = payload.pieces().iter().map(|piece| addresses(piece));
        self.written.lock().unwrap().extend(pieces);
    }
}

#[async_trait]
impl Storage for Watching {
    dcp_core::forward_storage!(
        inner: capabilities, stat, read_whole, list, list_folder, delete, leftovers, remove_empty_folders, claim
    );

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let buffers = request.ranges.iter().map(|read| addresses(&read.buffer));
        self.filled.lock().unwrap().extend(buffers);
        self.inner.read(key, request).await
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.note(&payload);
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let inner = self.inner.start_upload(key, options).await?;
        Ok(Box::new(WatchingUpload { inner, storage: self.clone() }))
    }
}

#[derive(Debug)]
struct WatchingUpload {
    inner: Box<dyn Upload>,
    storage: Watching,
}

#[async_trait]
impl Upload for WatchingUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        self.storage.note(&part);
        let (part, yields) = (self.inner.put_part(part), self.storage.yields);
        Box::pin(async move {
            for _ in 0..yields {
                tokio::task::yield_now().await;
            }
            part.await
        })
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        self.inner.complete().await
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        self.inner.abort().await
    }
}

/// Bytes of `memory` that lie in some of the ranges.
fn covered(memory: &Range<usize>, ranges: &[Range<usize>]) -> usize {
    let within = ranges
        .iter()
        .map(|range| range.end.min(memory.end).saturating_sub(range.start.max(memory.start)));
    within.sum()
}

#[test]
fn contiguous_tensors_are_written_from_and_read_into_their_own_memory() {
    let storage = Watching::new(Arc::new(MemoryStorage::new()), 0);
    let place: Arc<dyn Storage> = Arc::new(storage.clone());
    // 12 MiB, so that the file is uploaded in parts.
    let shape = [3 << 20];
    let tensor = |fill: u8| {
        let tensor = Tensor::zeros(DType::Float32, shape).unwrap();
        tensor.shards()[0].view().unwrap().fill_from(&vec![fill; 12 << 20]).unwrap();
        tensor
    };
    let memory = |tensor: &Tensor| {
        let memory = tensor.shards()[0].view().unwrap().memory().read().unwrap();
        addresses(&memory)
    };

    let saved = tensor(7);
    let state = StateDict::from([("t", saved.clone())]);
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&place)))).unwrap();
    let written = storage.written.lock().unwrap();
    assert_eq!(covered(&memory(&saved), &written), 12 << 20);

    let loaded = tensor(0);
    let mut state = StateDict::from([("t", loaded.clone())]);
    block_on(Loader::new().load(&mut state, &DcpReader::new(place))).unwrap();
    let filled = storage.filled.lock().unwrap();
    assert_eq!(covered(&memory(&loaded), &filled), 12 << 20);
    assert!(loaded.same(&saved));
}
