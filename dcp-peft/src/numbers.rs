//! Elements of tensors as numbers, and back.

use dcp_core::error::TensorError;
use dcp_core::{CheckpointError, DType, PlanError};
use dcp_jobs::cast::{CastCounts, CastOptions, Caster};

/// Elements of `dtype` as numbers.
pub(crate) fn floats_of(
    fqn: &str,
    dtype: DType,
    bytes: &[u8],
) -> Result<Vec<f32>, CheckpointError> {
    let single = cast(fqn, (dtype, DType::Float32), bytes)?;
    let (numbers, _) = single.as_chunks::<4>();
    Ok(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// Numbers as elements of `dtype`, rounded to the nearest, ties to even.
pub(crate) fn elements_of(
    fqn: &str,
    dtype: DType,
    numbers: &[f32],
) -> Result<Vec<u8>, CheckpointError> {
    let single: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    cast(fqn, (DType::Float32, dtype), &single)
}

/// Numbers after a round trip through `dtype`.
pub(crate) fn rounded(
    fqn: &str,
    dtype: DType,
    numbers: &[f32],
) -> Result<Vec<f32>, CheckpointError> {
    floats_of(fqn, dtype, &elements_of(fqn, dtype, numbers)?)
}

fn cast(fqn: &str, (from, to): (DType, DType), bytes: &[u8]) -> Result<Vec<u8>, CheckpointError> {
    let caster = Caster::new(fqn, from, to, CastOptions::default()).map_err(PlanError::plugin)?;
    let len = bytes.len() / from.size().max(1) * to.size();
    let mut target = Vec::new();
    target.try_reserve_exact(len).map_err(|_| TensorError::OutOfMemory {
        what: "the numbers of a tensor".into(),
        byte_len: len as u64,
    })?;
    target.resize(len, 0);
    caster.cast(bytes, &mut target, &mut CastCounts::default());
    Ok(target)
}
