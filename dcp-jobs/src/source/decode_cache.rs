//! Decodes a chunk once, although a job reads it in several parts.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::TensorError;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::text::Quoted;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, HostMemory, Region, StorageReader, TensorView,
    Value,
};
use futures_util::lock::Mutex as AsyncMutex;

/// The size in bytes of elements above which a decoded chunk is not cached.
const KEPT_MAX: u64 = 1 << 30;
/// The maximum ratio of decoded to stored bytes: that of zeros under zstd, rounded up.
pub(crate) const EXPANSION_MAX: u64 = 1 << 16;

/// A reader that caches the last decoded chunks that have a stream transform and were read in part.
///
/// Up to `slots` decoded chunks add to a job's [`max_memory`](crate::JobOptions::max_memory).
/// Chunks whose archive alone requires rearranging (transposed, conjugated, big-endian) look
/// ordinary in the index and are read again for each part.
#[derive(Debug)]
pub(crate) struct DecodedOnce {
    inner: Arc<dyn StorageReader>,
    slots: usize,
    /// Cached chunks, most recent last.
    kept: Mutex<VecDeque<Kept>>,
    /// Locks of the chunks being decoded.
    turns: Mutex<HashMap<(u32, u32), Weak<Turn>>>,
}

/// The lock of a chunk being decoded.
type Turn = AsyncMutex<()>;

#[derive(Clone, Debug)]
struct Kept {
    entry: u32,
    chunk: u32,
    elements: Bytes,
}

/// A chunk to decode.
struct Coded {
    chunk: u32,
    dtype: DType,
    /// The region of the whole chunk.
    whole: Region,
    part: Region,
}

impl DecodedOnce {
    pub(crate) fn new(inner: Arc<dyn StorageReader>, slots: usize) -> Self {
        Self { inner, slots: slots.max(1), kept: Mutex::default(), turns: Mutex::default() }
    }

    /// The lock of a chunk.
    fn turn(&self, chunk: (u32, u32)) -> Arc<Turn> {
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = turns.get(&chunk).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::new(Turn::new(()));
        turns.insert(chunk, Arc::downgrade(&turn));
        turn
    }

    async fn elements(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        item: &ReadItem,
        coded: &Coded,
        report: &mut ReadReport,
    ) -> Result<Bytes, CheckpointError> {
        let is_it = |kept: &Kept| (kept.entry, kept.chunk) == (item.entry, coded.chunk);
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let known = || lock().iter().find(|kept| is_it(kept)).map(|kept| kept.elements.clone());
        if let Some(elements) = known() {
            return Ok(elements);
        }
        // Concurrent reads of one chunk wait for the first.
        let turn = self.turn((item.entry, coded.chunk));
        let _decoding = turn.lock().await;
        if let Some(elements) = known() {
            return Ok(elements);
        }
        let failed = |source| CheckpointError::Memory { fqn: name(metadata, item), source };
        let bytes = coded.whole.volume().saturating_mul(coded.dtype.size() as u64);
        let memory = usize::try_from(bytes).ok().and_then(HostMemory::try_zeroed);
        let memory = memory.ok_or_else(|| TensorError::OutOfMemory {
            what: format!("a chunk of {}", Quoted(&name(metadata, item))),
            byte_len: bytes,
        })?;
        let sizes = coded.whole.sizes().clone();
        let view = TensorView::contiguous(memory.clone(), coded.dtype, sizes, 0)?;
        let (chunk, region) = (coded.chunk, coded.whole.clone());
        let kind = ReadKind::Tensor { chunk, shard: 0, region };
        let mut plan = LoadPlan::default();
        plan.items.push(ReadItem { entry: item.entry, leaf: item.leaf, kind });
        let read = self.inner.read(metadata, &plan, Arc::new(WholeChunk { view })).await?;
        *report += ReadReport::new(0, read.bytes_read);
        let elements = memory.read().map_err(failed)?;
        let mut kept = lock();
        if !kept.iter().any(is_it) {
            if kept.len() >= self.slots {
                kept.pop_front();
            }
            kept.push_back(Kept { entry: item.entry, chunk, elements: elements.clone() });
        }
        Ok(elements)
    }
}

/// The chunk of `item`, if it must be decoded whole and cached.
fn coded(metadata: &CheckpointMetadata, item: &ReadItem) -> Option<Coded> {
    let ReadKind::Tensor { chunk, region, .. } = &item.kind else { return None };
    let tensor = metadata.at(item.entry as usize)?.1.as_tensor()?;
    let stored = tensor.chunks.get(*chunk as usize)?;
    let placement = stored.placement?;
    let whole = stored.region().ok()?;
    let bytes = whole.volume().checked_mul(tensor.dtype.size() as u64)?;
    let plausible = bytes <= placement.byte_len.saturating_mul(EXPANSION_MAX).min(KEPT_MAX);
    let is_coded = !metadata.encoding(&placement)?.transforms.is_empty();
    let is_part = whole.contains(region) && *region != whole;
    (is_coded && plausible && is_part).then(|| Coded {
        chunk: *chunk,
        dtype: tensor.dtype,
        whole,
        part: region.clone(),
    })
}

fn name(metadata: &CheckpointMetadata, item: &ReadItem) -> String {
    metadata.entry_name(item.entry as usize).into_owned()
}

#[async_trait]
impl StorageReader for DecodedOnce {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.inner.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        let mut rest = LoadPlan::default();
        for item in &plan.items {
            let Some(coded) = coded(metadata, item) else {
                rest.items.push(item.clone());
                continue;
            };
            let elements = self.elements(metadata, item, &coded, &mut report).await?;
            let view = sink.destination(item)?;
            let Some(part) = coded.part.relative_to(coded.whole.offsets()) else { continue };
            let size = coded.dtype.size();
            let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX).saturating_mul(size);
            let mut wanted = Vec::with_capacity(usize::try_from(view.byte_len()).unwrap_or(0));
            for (start, len) in part.runs_in(coded.whole.sizes()) {
                let run = elements.get(at(start)..at(start.saturating_add(len)));
                wanted.extend_from_slice(run.unwrap_or_default());
            }
            view.fill_from(&wanted)
                .map_err(|source| CheckpointError::Memory { fqn: name(metadata, item), source })?;
            sink.commit(item)?;
            report += ReadReport::new(view.byte_len(), 0);
        }
        if !rest.items.is_empty() {
            report += self.inner.read(metadata, &rest, sink).await?;
        }
        Ok(report)
    }
}

/// Receives one chunk.
#[derive(Debug)]
struct WholeChunk {
    view: TensorView,
}

impl DataSink for WholeChunk {
    fn destination(&self, _item: &ReadItem) -> Result<TensorView, CheckpointError> {
        Ok(self.view.clone())
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, _value: Value) -> Result<(), CheckpointError> {
        Err(item.unrequested().into())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use dcp_core::Key;
    use dcp_core::metadata::{Encoding, Entry, Layout, Placement, TensorEntry};

    use super::*;
    use crate::read::segment_memory::SegmentMemory;
    use crate::read::tensor_read::{TensorReader, read_tensor};

    /// Two chunks of 6 × 8 and 4 × 8 bytes, whose elements are their positions in the tensor.
    #[derive(Debug, Default)]
    struct Counting {
        reads: AtomicUsize,
    }

    #[async_trait]
    impl StorageReader for Counting {
        async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
            let mut metadata = CheckpointMetadata::new();
            let file = metadata.intern_file(&Key::new("data.bin").unwrap()).unwrap();
            let coded = Encoding::new(Layout::Raw).with_transforms(["stream.zstd/1".into()]);
            let encoding = metadata.intern_encoding(&coded).unwrap();
            let mut tensor = TensorEntry::new(DType::UInt8, [10, 8]);
            for (row, rows) in [(0, 6), (6, 4)] {
                let placement = Placement { file, encoding, byte_offset: row, byte_len: 1 };
                tensor.chunks.push(&[row, 0], &[rows, 8], Some(placement)).unwrap();
            }
            metadata.insert("w", Entry::Tensor(tensor));
            Ok(Arc::new(metadata))
        }

        async fn read(
            &self,
            _: &Arc<CheckpointMetadata>,
            plan: &LoadPlan,
            sink: Arc<dyn DataSink>,
        ) -> Result<ReadReport, CheckpointError> {
            for item in &plan.items {
                self.reads.fetch_add(1, Ordering::Relaxed);
                tokio::task::yield_now().await;
                let ReadKind::Tensor { region, .. } = &item.kind else { panic!() };
                let runs = region.runs_in(&[10, 8]).flat_map(|(at, len)| at..at + len);
                let bytes: Vec<u8> = runs.map(|at| at as u8).collect();
                sink.destination(item)?.fill_from(&bytes).unwrap();
                sink.commit(item)?;
            }
            Ok(ReadReport::default())
        }
    }

    #[tokio::test]
    async fn each_chunk_is_decoded_once_for_all_its_parts() {
        let counting = Arc::new(Counting::default());
        let reader = Arc::new(DecodedOnce::new(Arc::clone(&counting) as _, 1));
        let metadata = reader.metadata().await.unwrap();
        let tensor = TensorReader::new(reader, metadata, 0).unwrap();
        let all = Region::full([10, 8]).unwrap();
        let segments = SegmentMemory::new(5);
        let mut found = Vec::new();
        for at in (0..80).step_by(5) {
            let part = read_tensor(&tensor, &all, 1, at..at + 5, &segments).await.unwrap();
            found.extend_from_slice(&part.to_bytes());
        }
        assert_eq!(found, (0..80).collect::<Vec<u8>>());
        assert_eq!(counting.reads.load(Ordering::Relaxed), 2);
        let part = |at| read_tensor(&tensor, &all, 1, at..at + 5, &segments);
        let at_once = (0..80).step_by(5).map(part);
        let parts = futures_util::future::try_join_all(at_once).await.unwrap();
        let found: Vec<u8> = parts.iter().flat_map(|part| part.to_bytes()).collect();
        assert_eq!(found, (0..80).collect::<Vec<u8>>());
        // The last chunk was kept; the first is decoded once for all concurrent requests.
        assert_eq!(counting.reads.swap(2, Ordering::Relaxed), 4);
        // What takes chunks whole needs nothing kept.
        assert_eq!(read_tensor(&tensor, &all, 1, 0..80, &segments).await.unwrap().len(), 80);
        assert_eq!(counting.reads.load(Ordering::Relaxed), 4);
    }
}
