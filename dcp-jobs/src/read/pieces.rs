//! Reads all elements of tensors once, in stored order, for jobs that do not depend on the order.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::DataSink;
use dcp_core::error::TensorError;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::text::Quoted;
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, HostMemory, PlanError, Region, StorageReader,
    TensorView, Value,
};

use crate::error::JobError;
use crate::read::runs::boxes;

/// Bytes of the largest element type.
const ELEMENT_MAX: u64 = 16;

/// A part of a chunk.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    /// The position of the tensor in the index.
    pub(crate) entry: usize,
    /// The position of the chunk in the tensor.
    pub(crate) chunk: u32,
    /// The elements, in the coordinates of the whole tensor.
    pub(crate) region: Region,
    /// Bytes of the elements.
    pub(crate) byte_len: u64,
}

/// Batches of at most `segment_bytes`, in file order. Small chunks share a batch; a larger chunk is
/// split.
#[derive(Debug)]
pub(crate) struct Batches {
    metadata: Arc<CheckpointMetadata>,
    segment_bytes: u64,
    /// Tensors and chunks, ordered by placement.
    chunks: std::vec::IntoIter<(usize, u32)>,
    /// The rest of the current chunk.
    rest: Option<Rest>,
}

#[derive(Debug)]
struct Rest {
    entry: usize,
    chunk: u32,
    region: Region,
    /// The number of row-major elements already read.
    done: u64,
    /// Boxes of the current cut that are not yet returned.
    cut: std::vec::IntoIter<Region>,
}

impl Batches {
    /// The pieces of the tensors at positions `entries` of the index, which must be consistent.
    pub(crate) fn new(
        metadata: &Arc<CheckpointMetadata>,
        entries: impl IntoIterator<Item = usize>,
        segment_bytes: u64,
    ) -> Self {
        let mut placed = Vec::new();
        for entry in entries {
            let tensor = metadata.at(entry).and_then(|(_, entry)| entry.as_tensor());
            for (at, chunk) in (0_u32..).zip(tensor.iter().flat_map(|t| t.chunks.iter())) {
                let place = chunk.placement.map(|place| (place.file, place.byte_offset));
                placed.push((place, entry, at));
            }
        }
        placed.sort();
        let chunks: Vec<_> = placed.into_iter().map(|(_, entry, at)| (entry, at)).collect();
        let metadata = Arc::clone(metadata);
        // An element is never split.
        let segment_bytes = segment_bytes.max(ELEMENT_MAX);
        Self { metadata, segment_bytes, chunks: chunks.into_iter(), rest: None }
    }

    /// The next piece of at most `room` bytes; `None` when the room is too small or nothing is
    /// left.
    fn piece(&mut self, room: u64) -> Result<Option<Piece>, JobError> {
        loop {
            let Some(rest) = &mut self.rest else {
                let Some((entry, chunk)) = self.chunks.next() else { return Ok(None) };
                let tensor = self.metadata.at(entry).and_then(|(_, entry)| entry.as_tensor());
                let stored = tensor.and_then(|tensor| tensor.chunks.get(chunk as usize));
                let region = match stored.map(|stored| stored.region()).transpose() {
                    Ok(Some(region)) if !region.is_empty() => region,
                    Ok(_) => continue,
                    Err(error) => {
                        let fqn = self.metadata.entry_name(entry).into_owned();
                        return Err(PlanError::from(error).with_fqn(fqn).into());
                    }
                };
                self.rest =
                    Some(Rest { entry, chunk, region, done: 0, cut: Vec::new().into_iter() });
                continue;
            };
            let tensor = self.metadata.at(rest.entry).and_then(|(_, entry)| entry.as_tensor());
            let element = tensor.map_or(1, |tensor| tensor.dtype.size() as u64);
            let bytes = |region: &Region| region.volume().saturating_mul(element);
            let piece = |region: Region| {
                let byte_len = bytes(&region);
                Piece { entry: rest.entry, chunk: rest.chunk, region, byte_len }
            };
            if let Some(next) = rest.cut.as_slice().first() {
                if bytes(next) > room {
                    return Ok(None);
                }
                return Ok(rest.cut.next().map(piece));
            }
            let total = rest.region.volume();
            if rest.done == total {
                self.rest = None;
                continue;
            }
            if rest.done == 0 && bytes(&rest.region) <= self.segment_bytes {
                if bytes(&rest.region) > room {
                    return Ok(None);
                }
                let whole = piece(rest.region.clone());
                self.rest = None;
                return Ok(Some(whole));
            }
            let end = total.min(rest.done + (self.segment_bytes / element).max(1));
            let cut = boxes(rest.region.sizes(), rest.done..end)
                .iter()
                .map(|inner| inner.translate(rest.region.offsets()))
                .collect::<Result<Vec<_>, _>>()
                .map_err(PlanError::from)?;
            rest.done = end;
            rest.cut = cut.into_iter();
        }
    }
}

impl Iterator for Batches {
    type Item = Result<Vec<Piece>, JobError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut batch = Vec::new();
        let mut room = self.segment_bytes;
        loop {
            match self.piece(room) {
                Ok(Some(piece)) => {
                    room = room.saturating_sub(piece.byte_len);
                    batch.push(piece);
                }
                Ok(None) if batch.is_empty() => return None,
                Ok(None) => return Some(Ok(batch)),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// The row-major elements of each piece of a batch, concatenated.
///
/// # Errors
///
/// When a chunk cannot be read, or is read whole and is damaged.
pub(crate) async fn read_batch(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    batch: &[Piece],
) -> Result<Bytes, CheckpointError> {
    let total = batch.iter().map(|piece| piece.byte_len).fold(0, u64::saturating_add);
    let name = |piece: &Piece| match metadata.at(piece.entry) {
        Some((fqn, _)) => fqn.to_string(),
        None => String::new(),
    };
    let Some(first) = batch.first() else { return Ok(Bytes::new()) };
    let memory = usize::try_from(total).ok().and_then(HostMemory::try_zeroed);
    let memory = memory.ok_or_else(|| TensorError::OutOfMemory {
        what: format!("parts of {}", Quoted(&name(first))),
        byte_len: total,
    })?;
    let mut plan = LoadPlan::default();
    let mut views = Vec::with_capacity(batch.len());
    let mut start = 0;
    for (leaf, piece) in (0_u32..).zip(batch) {
        let tensor = metadata.at(piece.entry).and_then(|(_, entry)| entry.as_tensor());
        let (Some(tensor), Ok(entry)) = (tensor, u32::try_from(piece.entry)) else {
            return Err(PlanError::not_a_tensor(name(piece)).into());
        };
        let kind = ReadKind::Tensor { chunk: piece.chunk, shard: 0, region: piece.region.clone() };
        plan.items.push(ReadItem { entry, leaf, kind });
        let sizes = piece.region.sizes().clone();
        views.push(TensorView::contiguous(memory.clone(), tensor.dtype, sizes, start)?);
        start += usize::try_from(piece.byte_len).unwrap_or(0);
    }
    reader.read(metadata, &plan, Arc::new(PieceSink { views })).await?;
    memory.read().map_err(|source| CheckpointError::Memory { fqn: name(first), source })
}

/// The memory of each piece, by the leaf of its item.
#[derive(Debug)]
struct PieceSink {
    views: Vec<TensorView>,
}

impl DataSink for PieceSink {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        self.views.get(item.leaf as usize).cloned().ok_or_else(|| unasked(item))
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, _value: Value) -> Result<(), CheckpointError> {
        Err(unasked(item))
    }
}

fn unasked(item: &ReadItem) -> CheckpointError {
    let problem = format!("the reader returns item {}, which was not requested", item.leaf);
    FormatError::new("read plan", problem).into()
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;
    use dcp_core::metadata::{Entry, TensorEntry};

    use super::*;

    /// A tensor of 6 x 7 elements of 4 bytes in chunks of 4, 0 and 2 rows.
    fn index() -> Arc<CheckpointMetadata> {
        let mut metadata = CheckpointMetadata::new();
        let mut tensor = TensorEntry::new(DType::Float32, [6, 7]);
        tensor.chunks.push(&[0, 0], &[4, 7], None).unwrap();
        tensor.chunks.push(&[4, 0], &[0, 7], None).unwrap();
        tensor.chunks.push(&[4, 0], &[2, 7], None).unwrap();
        metadata.insert("x", Entry::Tensor(tensor));
        Arc::new(metadata)
    }

    #[test]
    fn every_element_comes_once_and_no_batch_is_too_large() {
        let metadata = index();
        for segment in 16..200_u64 {
            let mut seen = vec![0; 42];
            for batch in Batches::new(&metadata, [0], segment) {
                let batch = batch.unwrap();
                let bytes: u64 = batch.iter().map(|piece| piece.byte_len).sum();
                assert!(bytes <= segment, "{bytes} of {segment}");
                for piece in batch {
                    for (at, len) in piece.region.runs_in(&[6, 7]) {
                        (at..at + len).for_each(|at| seen[at as usize] += 1);
                    }
                }
            }
            assert_eq!(seen, [1; 42], "segments of {segment}");
        }
    }

    #[test]
    fn what_fits_is_not_cut() {
        let metadata = index();
        let batches: Vec<_> =
            Batches::new(&metadata, [0], 1000).map(|batch| batch.unwrap().len()).collect();
        assert_eq!(batches, [2]);
        let batches: Vec<_> =
            Batches::new(&metadata, [0], 112).map(|batch| batch.unwrap().len()).collect();
        assert_eq!(batches, [1, 1]);
    }
}
