//! Reads boxes of one stored tensor into memory, from any chunks.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::DataSink;
use dcp_core::error::{ChunksProblem, TensorError};
use dcp_core::metadata::TensorEntry;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::text::Quoted;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, HostMemory, Payload, PlanError, Region,
    StorageReader, TensorView, Value,
};

use crate::read::chunk_index::ChunkIndex;
use crate::read::runs::boxes;
use crate::read::segment_memory::SegmentMemory;

/// A stored tensor to read by boxes.
#[derive(Clone, Debug)]
pub struct TensorReader {
    reader: Arc<dyn StorageReader>,
    metadata: Arc<CheckpointMetadata>,
    fqn: Arc<str>,
    entry: u32,
    chunks: Arc<ChunkIndex>,
}

impl TensorReader {
    /// The tensor at position `entry` of `metadata`.
    ///
    /// # Errors
    ///
    /// When the entry is not a tensor, or a chunk's box is invalid.
    pub fn new(
        reader: Arc<dyn StorageReader>,
        metadata: Arc<CheckpointMetadata>,
        entry: usize,
    ) -> Result<Self, CheckpointError> {
        let at = metadata.at(entry);
        let tensor = at.and_then(|(fqn, entry)| Some((Arc::clone(fqn), entry.as_tensor()?)));
        let (Some((fqn, tensor)), Ok(entry)) = (tensor, u32::try_from(entry)) else {
            let fqn = metadata.entry_name(entry).into_owned();
            return Err(PlanError::not_a_tensor(fqn).into());
        };
        let mut chunks = Vec::with_capacity(tensor.chunks.len());
        for (index, chunk) in (0_u32..).zip(tensor.chunks.iter()) {
            let region = chunk.region().map_err(|error| PlanError::from(error).with_fqn(&*fqn))?;
            if !region.is_empty() {
                chunks.push((index, region));
            }
        }
        Ok(Self { reader, entry, fqn, chunks: Arc::new(ChunkIndex::new(chunks)), metadata })
    }

    /// The tensor's entry in the index.
    ///
    /// # Errors
    ///
    /// When the index changed since [`new`](Self::new).
    pub fn tensor(&self) -> Result<&TensorEntry, CheckpointError> {
        let entry = self.metadata.at(self.entry as usize);
        entry
            .and_then(|(_, entry)| entry.as_tensor())
            .ok_or_else(|| PlanError::not_a_tensor(self.fqn.to_string()).into())
    }

    /// The tensor's FQN.
    #[must_use]
    pub fn fqn(&self) -> &Arc<str> {
        &self.fqn
    }

    /// The index that describes the tensor.
    #[must_use]
    pub fn metadata(&self) -> &Arc<CheckpointMetadata> {
        &self.metadata
    }

    /// Reads `boxes` and concatenates their row-major elements. All of them are in memory at once,
    /// so the caller keeps the boxes small or has checked that the files are large enough.
    ///
    /// # Errors
    ///
    /// When a chunk cannot be read, or the chunks do not cover every element exactly once.
    pub async fn read(&self, boxes: &[Region]) -> Result<Bytes, CheckpointError> {
        self.read_segment(boxes, &SegmentMemory::new(0)).await
    }

    /// As [`read`](Self::read), into memory of `segments`.
    async fn read_segment(
        &self,
        boxes: &[Region],
        segments: &Arc<SegmentMemory>,
    ) -> Result<Bytes, CheckpointError> {
        let dtype = self.tensor()?.dtype;
        let mut plan = LoadPlan::default();
        let mut total = 0_u64;
        for (leaf, wanted) in (0_u32..).zip(boxes) {
            self.plan_box(leaf, wanted, &mut plan)?;
            total = total.saturating_add(wanted.volume().saturating_mul(dtype.size() as u64));
        }
        let lease = segments.take(total).ok_or_else(|| TensorError::OutOfMemory {
            what: format!("parts of {}", Quoted(&self.fqn)),
            byte_len: total,
        })?;
        if !plan.items.is_empty() {
            let sink = Arc::new(BoxSink { boxes: self.views(boxes, dtype, lease.memory())? });
            self.reader.read(&self.metadata, &plan, sink).await?;
        }
        lease
            .freeze()
            .map_err(|source| CheckpointError::Memory { fqn: self.fqn.to_string(), source })
    }

    /// Reads the row-major elements `range` of `region`. All of them are in memory at once, so the
    /// caller keeps the range small.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub async fn read_range(
        &self,
        region: &Region,
        range: Range<u64>,
    ) -> Result<Bytes, CheckpointError> {
        let inner = boxes(region.sizes(), range).into_iter();
        let found: Result<Vec<_>, _> =
            inner.map(|inner| inner.translate(region.offsets())).collect();
        self.read(&found.map_err(|error| PlanError::from(error).with_fqn(&*self.fqn))?).await
    }

    /// Plans the reads that fill `wanted`, and checks that they cover it.
    fn plan_box(
        &self,
        leaf: u32,
        wanted: &Region,
        plan: &mut LoadPlan,
    ) -> Result<(), CheckpointError> {
        let mut found = 0_u64;
        for (chunk, region) in self.chunks.find(wanted) {
            found = found.saturating_add(region.volume());
            let kind = ReadKind::Tensor { chunk, shard: 0, region };
            plan.items.push(ReadItem { entry: self.entry, leaf, kind });
        }
        if found == wanted.volume() {
            return Ok(());
        }
        let fqn = self.fqn.to_string();
        let expected = wanted.volume();
        Err(CheckpointError::Plan(if found < expected {
            ChunksProblem::Uncovered { expected, found }.of(fqn)
        } else {
            PlanError::Index { fqn, problem: format!("chunks overlap in {wanted}") }
        }))
    }

    fn views(
        &self,
        boxes: &[Region],
        dtype: DType,
        memory: &HostMemory,
    ) -> Result<Vec<(Region, TensorView)>, CheckpointError> {
        let mut start = 0_usize;
        let mut views = Vec::with_capacity(boxes.len());
        for region in boxes {
            let sizes = region.sizes().clone();
            let view = TensorView::contiguous(memory.clone(), dtype, sizes, start)?;
            // The sum of all was checked.
            start += usize::try_from(view.byte_len()).unwrap_or(0);
            views.push((region.clone(), view));
        }
        Ok(views)
    }
}

/// The memory of the boxes of one tensor, by the leaf of their items.
#[derive(Debug)]
struct BoxSink {
    boxes: Vec<(Region, TensorView)>,
}

impl DataSink for BoxSink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        let (ReadKind::Tensor { region, .. }, Some((whole, view))) =
            (&item.kind, self.boxes.get(item.leaf as usize))
        else {
            return Err(item.unrequested().into());
        };
        let inner = region.relative_to(whole.offsets());
        let inner = inner.ok_or_else(|| item.unrequested())?;
        Ok(view.narrow(&inner)?)
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, _value: Value) -> Result<(), CheckpointError> {
        Err(item.unrequested().into())
    }
}

/// Reads the bytes `byte_range` of the row-major elements of `region`, into memory of `segments`.
pub(crate) async fn read_tensor(
    reader: &TensorReader,
    region: &Region,
    element_bytes: u64,
    byte_range: Range<u64>,
    segments: &Arc<SegmentMemory>,
) -> Result<Payload, CheckpointError> {
    let element_bytes = element_bytes.max(1);
    let first = byte_range.start / element_bytes;
    let wanted = boxes(region.sizes(), first..byte_range.end.div_ceil(element_bytes))
        .iter()
        .map(|inner| inner.translate(region.offsets()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| PlanError::from(error).with_fqn(&**reader.fqn()))?;
    let bytes = reader.read_segment(&wanted, segments).await?;
    let skipped = byte_range.start - first * element_bytes;
    Ok(Payload::from(bytes).slice(skipped..skipped + (byte_range.end - byte_range.start)))
}
