//! Lookups of the entries and chunks that plans refer to in the metadata.

use dcp_core::error::ChunksProblem;
use dcp_core::metadata::Entry;
use dcp_core::{CheckpointError, CheckpointMetadata, DType, PlanError, Region};

/// A message between the ranks of a load cannot be decoded.
pub(crate) fn bad_message(problem: &str) -> CheckpointError {
    let message = "a message with elements or objects".to_owned();
    PlanError::message(message, problem).into()
}

/// The ranks of a load are at different steps.
pub(crate) fn out_of_step(problem: &str) -> CheckpointError {
    PlanError::out_of_step(problem).into()
}

/// A plan refers to an entry or a chunk that the metadata does not have.
pub(crate) fn no_entry(entry: u32, chunk: Option<u32>) -> CheckpointError {
    PlanError::no_entry(entry.into(), chunk.map(u64::from)).into()
}

/// A plan reads `region` of a chunk, which must contain it.
pub(crate) fn check_chunk(
    metadata: &CheckpointMetadata,
    entry: u32,
    chunk: u32,
    region: &Region,
) -> Result<(), CheckpointError> {
    let (fqn, stored) = metadata.at(entry as usize).ok_or_else(|| no_entry(entry, None))?;
    let known = stored.as_tensor().and_then(|tensor| tensor.chunks.get(chunk as usize));
    let known = known.and_then(|chunk| chunk.region().ok());
    let known = known.ok_or_else(|| no_entry(entry, Some(chunk)))?;
    if known.contains(region) {
        return Ok(());
    }
    Err(ChunksProblem::Outside {
        region: region.to_string(),
        bounds: format!("chunk {chunk} at {known}"),
        rank: None,
    }
    .of(fqn.to_string())
    .into())
}

/// The dtype of the tensor that a plan reads.
pub(crate) fn tensor_dtype(
    metadata: &CheckpointMetadata,
    entry: u32,
) -> Result<DType, CheckpointError> {
    let (fqn, stored) = metadata.at(entry as usize).ok_or_else(|| no_entry(entry, None))?;
    let tensor = stored.as_tensor();
    Ok(tensor.ok_or_else(|| PlanError::not_a_tensor(fqn.to_string()))?.dtype)
}

/// The bytes of a stored object; 0 where the index does not have them.
pub(crate) fn object_bytes(metadata: &CheckpointMetadata, entry: u32) -> u64 {
    match metadata.at(entry as usize) {
        Some((_, Entry::Object(object))) => object.placement.map_or(0, |at| at.byte_len),
        _ => 0,
    }
}
