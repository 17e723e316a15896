//! Whole tensors of the shards that ranks wrote.

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::DataSource;
use dcp_core::metadata::Entry;
use dcp_core::storage::{OwnThreads, StorageExt as _};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Dims, FormatError, Key, Payload, PlanError, Region,
    Storage,
};

use super::layout::HfPart;

/// The most bytes of a tensor that are read at once.
const SEGMENT_BYTES: u64 = 8 << 20;

/// The tensors of a checkpoint whose chunks are stored as plain elements.
#[derive(Debug)]
pub(super) struct StoredTensors {
    storage: Arc<dyn Storage>,
    tensors: Vec<StoredTensor>,
}

#[derive(Debug)]
struct StoredTensor {
    fqn: Arc<str>,
    shape: Dims,
    element: u64,
    chunks: Vec<StoredChunk>,
}

#[derive(Debug)]
struct StoredChunk {
    region: Region,
    file: Key,
    byte_offset: u64,
}

/// Bytes of a chunk and their place in a segment.
struct Run {
    in_chunk: u64,
    in_segment: usize,
    len: usize,
}

impl StoredTensors {
    /// The tensors of `metadata`, and a part to write for each.
    pub(super) fn of(
        storage: Arc<dyn Storage>,
        metadata: &CheckpointMetadata,
    ) -> Result<(Self, Vec<HfPart>), CheckpointError> {
        let (mut tensors, mut parts) = (Vec::new(), Vec::new());
        for (fqn, entry) in metadata.iter() {
            let Entry::Tensor(tensor) = entry else { continue };
            let mut chunks = Vec::with_capacity(tensor.chunks.len());
            for chunk in tensor.chunks.iter() {
                let region = chunk.region()?;
                let placed = chunk.placement;
                let placed = placed.and_then(|placed| Some((placed, metadata.file(placed.file)?)));
                let (placed, file) = placed.ok_or_else(|| unplaced(fqn))?;
                let (file, byte_offset) = (file.clone(), placed.byte_offset);
                chunks.push(StoredChunk { region, file, byte_offset });
            }
            let (shape, element) = (tensor.shape.clone(), tensor.dtype.size() as u64);
            parts.push(HfPart::whole(Arc::clone(fqn), tensor.dtype, shape.clone()));
            tensors.push(StoredTensor { fqn: Arc::clone(fqn), shape, element, chunks });
        }
        Ok((Self { storage, tensors }, parts))
    }
}

impl StoredTensor {
    /// The bytes of a chunk that are in `range` of the tensor; ascending in both.
    fn runs(&self, chunk: &StoredChunk, range: &Range<u64>) -> Vec<Run> {
        let (mut runs, mut before) = (Vec::new(), 0_u64);
        for (first, count) in chunk.region.runs_in(&self.shape) {
            let (start, len) = (first * self.element, count * self.element);
            if start >= range.end {
                break;
            }
            let (low, high) = (start.max(range.start), (start + len).min(range.end));
            if low < high {
                // Both fit: they are within a segment.
                let (in_segment, len) = ((low - range.start) as usize, (high - low) as usize);
                runs.push(Run { in_chunk: before + (low - start), in_segment, len });
            }
            before += len;
        }
        runs
    }
}

#[async_trait]
impl DataSource for StoredTensors {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        let tensor = self
            .tensors
            .get(item)
            .ok_or(PlanError::no_item(item as u64, self.tensors.len() as u64))?;
        let len = byte_range.end.saturating_sub(byte_range.start);
        let mut segment = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        let mut filled = 0_u64;
        for chunk in &tensor.chunks {
            let runs = tensor.runs(chunk, &byte_range);
            let (Some(first), Some(last)) = (runs.first(), runs.last()) else { continue };
            // One read: runs of a chunk are adjacent in its file.
            let start = chunk.byte_offset + first.in_chunk;
            let end = chunk.byte_offset + last.in_chunk + last.len as u64;
            let bytes = self.storage.read_range(&chunk.file, start..end).await?;
            let mut rest = &*bytes;
            for run in &runs {
                let (now, later) = rest.split_at(run.len.min(rest.len()));
                if let Some(target) = segment.get_mut(run.in_segment..run.in_segment + now.len()) {
                    target.copy_from_slice(now);
                    filled += now.len() as u64;
                }
                rest = later;
            }
        }
        if filled != len {
            let problem = format!("the files of ranks have {filled} of {len} bytes of a segment");
            return Err(FormatError::new("tensor", format!("{:?}: {problem}", tensor.fqn)).into());
        }
        Ok(Payload::from(segment))
    }

    fn segment_bytes(&self) -> u64 {
        SEGMENT_BYTES
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        None
    }
}

fn unplaced(fqn: &str) -> FormatError {
    FormatError::new("checkpoint", format!("a part of {fqn:?} was written by no rank"))
}
