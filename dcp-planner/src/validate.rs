//! Whether the chunks of a tensor lie inside it, apart from each other, and cover it.
//!
//! The rules are PyTorch 2.15's `_validate_global_plan`; unlike there, every problem of every key
//! is reported, no layout takes quadratic time, and empty chunks never overlap anything.

use dcp_core::dims::checked_volume;
use dcp_core::error::ChunksProblem;
use dcp_core::metadata::{ChunkRef, ChunkTable, Entry, Layout, TensorEntry};
use dcp_core::overlap::find_overlap;
use dcp_core::{CheckpointMetadata, Dims, PlanError, Rank};

/// Chunks outside their tensor that are reported for one tensor.
const MAX_OUTSIDE: usize = 8;

/// Everything that is wrong with a checkpoint's index, as far as it can be seen without its
/// files: chunks out of bounds, overlapping, missing, without stored bytes, or with a place that
/// does not fit.
///
/// PyTorch commits such indices when a writer thread fails (2.15), and notices on load at best.
#[must_use]
pub fn validate_metadata(metadata: &CheckpointMetadata) -> Vec<PlanError> {
    let mut errors = Vec::new();
    for (fqn, entry) in metadata.iter() {
        match entry {
            Entry::Tensor(tensor) => {
                check_chunks(fqn, &tensor.shape, &tensor.chunks, true, |_| None, &mut errors);
                check_placements(metadata, fqn, tensor, &mut errors);
            }
            Entry::Object(object) => match object.placement {
                None => errors.push(invalid_index(fqn, "the object has no stored bytes")),
                Some(placement) => {
                    if metadata.file(placement.file).is_none()
                        || metadata.encoding(&placement).is_none()
                    {
                        errors.push(invalid_index(fqn, "the object is in an unknown file"));
                    }
                }
            },
            _ => {}
        }
    }
    errors
}

fn check_placements(
    metadata: &CheckpointMetadata,
    fqn: &str,
    tensor: &TensorEntry,
    errors: &mut Vec<PlanError>,
) {
    let mut lost = 0_usize;
    let mut first_lost = None;
    for chunk in tensor.chunks.iter().filter(|chunk| !chunk.sizes.contains(&0)) {
        let Some(placement) = chunk.placement else {
            lost += 1;
            first_lost = first_lost.or(Some(chunk));
            continue;
        };
        let Some(encoding) = metadata.encoding(&placement) else {
            errors.push(invalid_index(fqn, &format!("{} has an unknown encoding", shown(chunk))));
            continue;
        };
        if metadata.file(placement.file).is_none() {
            errors.push(invalid_index(fqn, &format!("{} is in an unknown file", shown(chunk))));
        }
        let exact = encoding.layout == Layout::Raw && encoding.transforms.is_empty();
        let bytes = checked_volume(chunk.sizes)
            .and_then(|volume| volume.checked_mul(tensor.dtype.size() as u64));
        if exact && bytes != Some(placement.byte_len) {
            let stored = placement.byte_len;
            let problem = format!("{} is stored in {stored} bytes", shown(chunk));
            errors.push(invalid_index(fqn, &problem));
        }
    }
    if let Some(chunk) = first_lost {
        let problem = format!("{lost} of its {} chunks have no stored bytes", tensor.chunks.len());
        errors.push(invalid_index(fqn, &format!("{problem}, the first is {}", shown(chunk))));
    }
}

/// Checks one tensor. Checks whether its chunks cover it only with `whole`, because a rank
/// that saves on its own holds a part. `rank` says whose a chunk is.
pub(crate) fn check_chunks(
    fqn: &str,
    shape: &Dims,
    chunks: &ChunkTable,
    whole: bool,
    rank: impl Fn(usize) -> Option<Rank>,
    errors: &mut Vec<PlanError>,
) {
    let Some(expected) = shape.checked_volume() else {
        errors.push(PlanError::TooLarge {
            what: format!("the number of elements of {fqn:?}, of shape {shape},"),
            limit: u64::MAX,
        });
        return;
    };
    if chunks.ndim() != shape.ndim() {
        errors.push(ChunksProblem::Axes { expected: shape.ndim(), found: chunks.ndim() }.of(fqn));
        return;
    }
    let mut inside: Vec<(&[u64], &[u64])> = Vec::with_capacity(chunks.len());
    let mut outside = 0_usize;
    let mut volume = 0_u128;
    for (index, chunk) in chunks.iter().enumerate() {
        if !fits(chunk, shape) {
            if outside < MAX_OUTSIDE {
                errors.push(
                    ChunksProblem::Outside {
                        region: shown(chunk),
                        bounds: format!("shape {shape}"),
                        rank: rank(index),
                    }
                    .of(fqn),
                );
            }
            outside += 1;
            continue;
        }
        volume += u128::from(checked_volume(chunk.sizes).unwrap_or(0));
        inside.push((chunk.offsets, chunk.sizes));
    }
    match find_overlap(&inside) {
        Ok(None) => {}
        Ok(Some((first, second))) => {
            let shown = |(offsets, sizes)| shown(ChunkRef { offsets, sizes, placement: None });
            errors.push(
                ChunksProblem::Overlap {
                    first: shown(inside[first.min(second)]),
                    second: shown(inside[first.max(second)]),
                }
                .of(fqn),
            );
        }
        Err(_) => errors.push(ChunksProblem::TooIrregular.of(fqn)),
    }
    if whole && outside == 0 && volume != u128::from(expected) {
        errors.push(
            ChunksProblem::Uncovered { expected, found: u64::try_from(volume).unwrap_or(u64::MAX) }
                .of(fqn),
        );
    }
}

fn fits(chunk: ChunkRef<'_>, shape: &Dims) -> bool {
    let ends = chunk.offsets.iter().zip(chunk.sizes).map(|(o, s)| o.checked_add(*s));
    ends.zip(&**shape).all(|(end, len)| end.is_some_and(|end| end <= *len))
}

/// A chunk in words, also one whose end exceeds 64 bits.
pub(crate) fn shown(chunk: ChunkRef<'_>) -> String {
    match chunk.region() {
        Ok(region) => format!("chunk {region}"),
        Err(error) => error.to_string(),
    }
}

pub(crate) fn invalid_index(fqn: &str, problem: &str) -> PlanError {
    PlanError::Index { fqn: fqn.to_owned(), problem: problem.to_owned() }
}
