//! Statistics of a checkpoint's numbers: minimum, maximum, mean, deviation, magnitudes, and the
//! position of the first NaN.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::{CheckpointError, CheckpointMetadata, DType, Dims, FormatError, StorageReader};
use futures_util::{StreamExt, stream};
use indexmap::IndexMap;

use crate::error::JobError;
use crate::group::JobGroup;
use crate::integrity::check::refuse_unsound;
use crate::integrity::checked_source::CheckedSource;
use crate::keys::select::{Chosen, Selection};
use crate::options::JobOptions;
use crate::read::objects::ObjectBatches;
use crate::read::pieces::{Batches, Piece, read_batch};
use crate::source::Source;
use crate::stats::exchange::{Outgoing, receive};
use crate::stats::moments::{Moments, Observer};
use crate::stats::objects::look;
use crate::stats::report::{BadChunk, NumberStats, ObjectStats, StatsReport, TensorStats};

/// The maximum number of chunks with NaNs or infinities that are listed per tensor.
pub const BAD_CHUNKS_MAX: usize = 64;

/// Computes the statistics of the selected tensors and objects. Reads every stored byte once, in
/// file order. The ranks of a [group](JobOptions::group) divide the tensors by bytes, and the report of
/// rank 0 is that of one process, to the last bit; the others' is not complete.
///
/// # Errors
///
/// When there is no checkpoint, it is inconsistent or damaged, or the storage fails. Damaged bytes
/// never enter the statistics.
pub async fn stats(
    source: &Source,
    selection: &Selection,
    options: &JobOptions,
) -> Result<StatsReport, JobError> {
    let source = CheckedSource::new(source, options);
    let metadata = source.metadata().await?;
    refuse_unsound(&metadata)?;
    let (chosen, names) = (selection.in_source(&source).await?, source.names().await?);
    selection.refuse_nothing(&names, &chosen, &metadata)?;
    let mut tensors = tensors(&metadata, &chosen);
    let segment_bytes = options.segment_bytes(2 * options.parallelism);
    let total = tensors.values().map(|tensor| tensor.byte_len).fold(0, u64::saturating_add);
    options.start(total);
    let entries: Vec<usize> = tensors.keys().copied().collect();
    let batches = || Batches::new(&metadata, entries.iter().copied(), segment_bytes);
    let (own, mut outgoing) = match &options.group {
        Some(group) => (share_of(group, batches())?, Some(Outgoing::new())),
        None => (0..usize::MAX, None),
    };
    let mut results = stream::iter(batches().take(own.end).skip(own.start))
        .map(|batch| {
            let (reader, metadata) = (Arc::clone(&source.reader), Arc::clone(&metadata));
            // Counting is CPU-bound; the tasks run in parallel on a runtime with several threads.
            tokio::spawn(async move { observe(&reader, &metadata, batch?).await })
        })
        .buffered(options.parallelism.max(1));
    while let Some(done) = results.next().await {
        options.check_group()?;
        let observed = done.map_err(|error| JobError::task("counts elements", &error))??;
        for (piece, moments) in observed {
            options.advance(piece.byte_len);
            match (&mut outgoing, tensors.get_mut(&piece.entry)) {
                (Some(outgoing), _) => outgoing.push(piece.entry, moments),
                (None, Some(tensor)) => tensor.add(&metadata, &piece, &moments),
                (None, None) => {}
            }
        }
    }
    drop(results);
    let objects = match options.is_coordinator() {
        true => objects(&source, &metadata, &chosen).await?,
        false => ObjectStats::default(),
    };
    if let (Some(group), Some(outgoing)) = (&options.group, outgoing)
        && let Some(messages) = group.gather(outgoing.finish()).await?
    {
        receive(&messages, pieces(batches()), |piece, moments| {
            if let Some(tensor) = tensors.get_mut(&piece.entry) {
                tensor.add(&metadata, piece, moments);
            }
        })?;
    }
    drop(source.finish().await?);
    let mut report = StatsReport {
        format: metadata.provenance().format.as_deref().unwrap_or("unknown").to_owned(),
        tensors: IndexMap::new(),
        objects,
        total: NumberStats::default(),
        unmatched: selection.unmatched(&names)?,
        notes: Vec::new(),
    };
    let mut all = Moments::default();
    let (mut subnormal, mut near_overflow) = (0, 0);
    for tensor in tensors.into_values() {
        all.merge(&tensor.moments);
        let (fqn, stats) = tensor.finish();
        subnormal += stats.numbers.subnormal;
        near_overflow += stats.numbers.near_overflow;
        report.tensors.insert(fqn, stats);
    }
    // The range over integers and floats together is that of floats.
    all.wide = None;
    report.total = NumberStats { subnormal, near_overflow, ..NumberStats::of(&all) };
    Ok(report)
}

/// The batches that are divided among ranks at most: 512 TiB with the default memory. An index may claim
/// any number of elements.
const BATCHES_MAX: usize = 1 << 24;

/// The batches that this rank reads.
fn share_of(group: &JobGroup, batches: Batches) -> Result<Range<usize>, JobError> {
    let byte_len = |batch: Vec<Piece>| batch.iter().map(|piece| piece.byte_len).sum();
    let byte_lens = batches.take(BATCHES_MAX + 1).map(|batch| batch.map(byte_len));
    let byte_lens = byte_lens.collect::<Result<Vec<u64>, _>>()?;
    if byte_lens.len() > BATCHES_MAX {
        let problem = format!(
            "its tensors claim more than {BATCHES_MAX} segments; if they are so long, \
                               run with more memory, or without a group"
        );
        return Err(CheckpointError::from(FormatError::new("index", problem)).into());
    }
    Ok(group.share(&byte_lens))
}

/// The pieces of batches, in their order.
fn pieces(batches: Batches) -> impl Iterator<Item = Result<Piece, JobError>> {
    batches.flat_map(|batch| {
        let (batch, error) = match batch {
            Ok(batch) => (batch, None),
            Err(error) => (Vec::new(), Some(Err(error))),
        };
        batch.into_iter().map(Ok).chain(error)
    })
}

/// A tensor and its statistics so far.
struct Tensor {
    fqn: Arc<str>,
    dtype: DType,
    shape: Dims,
    byte_len: u64,
    moments: Moments,
    /// The row-major position of the first NaN or infinity, and its index.
    first: Option<(u64, Vec<u64>)>,
    bad_chunks: IndexMap<u32, BadChunk>,
    bad_chunk_count: u64,
    last_bad_chunk: Option<u32>,
}

/// The selected tensors, by their position in the index.
fn tensors(metadata: &CheckpointMetadata, chosen: &[Chosen]) -> IndexMap<usize, Tensor> {
    let tensors = chosen.iter().filter_map(|chosen| {
        let tensor = metadata.at(chosen.entry)?.1.as_tensor()?;
        let tensor = Tensor {
            fqn: Arc::clone(&chosen.fqn),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            byte_len: tensor.byte_len().unwrap_or(u64::MAX),
            moments: Moments::default(),
            first: None,
            bad_chunks: IndexMap::new(),
            bad_chunk_count: 0,
            last_bad_chunk: None,
        };
        Some((chosen.entry, tensor))
    });
    tensors.collect()
}

impl Tensor {
    fn add(&mut self, metadata: &CheckpointMetadata, piece: &Piece, moments: &Moments) {
        if let Some(at) = moments.first_non_finite {
            self.bad(metadata, piece, moments, at);
        }
        self.moments.merge(moments);
    }

    /// Records the first NaN or infinity of `piece`: number `at` of its numbers.
    fn bad(&mut self, metadata: &CheckpointMetadata, piece: &Piece, moments: &Moments, at: u64) {
        let per_element = crate::element::numbers::Numbers::new(self.dtype).per_element() as u64;
        let inner = unravel(at / per_element, piece.region.sizes());
        let place: Vec<u64> =
            inner.iter().zip(&**piece.region.offsets()).map(|(a, b)| a + b).collect();
        let position = ravel(&place, &self.shape);
        if self.first.as_ref().is_none_or(|(first, _)| position < *first) {
            self.first = Some((position, place.clone()));
        }
        // The pieces of a chunk follow each other.
        if self.last_bad_chunk != Some(piece.chunk) {
            self.last_bad_chunk = Some(piece.chunk);
            self.bad_chunk_count += 1;
            if self.bad_chunks.len() < BAD_CHUNKS_MAX {
                let chunk = bad_chunk(metadata, piece, place);
                self.bad_chunks.insert(piece.chunk, chunk);
            }
        }
        if let Some(chunk) = self.bad_chunks.get_mut(&piece.chunk) {
            chunk.nan += moments.nan;
            chunk.inf += moments.pos_inf + moments.neg_inf;
        }
    }

    fn finish(self) -> (Arc<str>, TensorStats) {
        let stats = TensorStats {
            dtype: self.dtype.name(),
            shape: self.shape.to_vec(),
            bytes: self.byte_len,
            numbers: NumberStats::of_dtype(self.dtype, &self.moments),
            first_non_finite: self.first.map(|(_, place)| place),
            non_finite_chunks: self.bad_chunks.into_values().collect(),
            non_finite_chunk_count: self.bad_chunk_count,
        };
        (self.fqn, stats)
    }
}

fn bad_chunk(metadata: &CheckpointMetadata, piece: &Piece, first: Vec<u64>) -> BadChunk {
    let tensor = metadata.at(piece.entry).and_then(|(_, entry)| entry.as_tensor());
    let chunk = tensor.and_then(|tensor| tensor.chunks.get(piece.chunk as usize));
    let placement = chunk.and_then(|chunk| chunk.placement);
    let file = placement.and_then(|place| metadata.file(place.file)).map(ToString::to_string);
    BadChunk {
        offsets: chunk.map_or_else(Vec::new, |chunk| chunk.offsets.to_vec()),
        sizes: chunk.map_or_else(Vec::new, |chunk| chunk.sizes.to_vec()),
        rank: file.as_deref().and_then(rank_of),
        file,
        nan: 0,
        inf: 0,
        first,
    }
}

/// The rank in the name of a data file: 3 of `__3_0.distcp`.
fn rank_of(file: &str) -> Option<u64> {
    let name = file.rsplit('/').next()?.strip_suffix(".distcp")?;
    name.strip_prefix("__")?.split('_').next()?.parse().ok()
}

/// The index of row-major element `at` in a box.
pub(crate) fn unravel(at: u64, sizes: &[u64]) -> Vec<u64> {
    let mut rest = at;
    let mut place = vec![0; sizes.len()];
    for (step, size) in place.iter_mut().zip(sizes).rev() {
        *step = rest % (*size).max(1);
        rest /= (*size).max(1);
    }
    place
}

fn ravel(place: &[u64], shape: &[u64]) -> u64 {
    place
        .iter()
        .zip(shape)
        .fold(0_u64, |at, (step, size)| at.saturating_mul(*size).saturating_add(*step))
}

/// Computes the statistics of each piece of a batch.
async fn observe(
    reader: &Arc<dyn StorageReader>,
    metadata: &Arc<CheckpointMetadata>,
    batch: Vec<Piece>,
) -> Result<Vec<(Piece, Moments)>, JobError> {
    let bytes: Bytes = read_batch(reader, metadata, &batch).await?;
    let mut observer = Observer::default();
    let mut rest = &*bytes;
    let mut observed = Vec::with_capacity(batch.len());
    for piece in batch {
        let tensor = metadata.at(piece.entry).and_then(|(_, entry)| entry.as_tensor());
        let len = usize::try_from(piece.byte_len).unwrap_or(usize::MAX).min(rest.len());
        let (elements, after) = rest.split_at(len);
        rest = after;
        if let Some(tensor) = tensor {
            let moments = observer.observe(tensor.dtype, elements);
            observed.push((piece, moments));
        }
    }
    Ok(observed)
}

async fn objects(
    source: &Source,
    metadata: &Arc<CheckpointMetadata>,
    chosen: &[Chosen],
) -> Result<ObjectStats, JobError> {
    let is_object = |entry: usize| metadata.at(entry).is_some_and(|(_, e)| e.as_object().is_some());
    let names: HashMap<usize, &Arc<str>> = chosen
        .iter()
        .filter(|chosen| is_object(chosen.entry))
        .map(|chosen| (chosen.entry, &chosen.fqn))
        .collect();
    let mut entries: Vec<usize> = names.keys().copied().collect();
    entries.sort_unstable();
    let mut stats = ObjectStats::default();
    let mut batches = ObjectBatches::new(source, metadata, &entries);
    while let Some(batch) = batches.next().await {
        for (entry, value) in batch {
            if let Some(fqn) = names.get(&entry) {
                look(&mut stats, fqn, &value?);
            }
        }
    }
    Ok(stats)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_and_positions() {
        for at in 0..24 {
            assert_eq!(ravel(&unravel(at, &[2, 3, 4]), &[2, 3, 4]), at);
        }
        assert_eq!(unravel(23, &[2, 3, 4]), [1, 2, 3]);
        assert_eq!(unravel(0, &[]), [0; 0]);
    }

    #[test]
    fn ranks_are_in_the_names_of_files() {
        assert_eq!(rank_of("__3_0.distcp"), Some(3));
        assert_eq!(rank_of("__12_7.g2.distcp"), Some(12));
        assert_eq!(rank_of("model.safetensors"), None);
        assert_eq!(rank_of("__x_0.distcp"), None);
    }
}
