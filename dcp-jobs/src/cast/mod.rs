//! Casts, and their tests against PyTorch; the arithmetic is that of `dcp-cast`.

pub(crate) use dcp_cast::is_averaged;
pub use dcp_cast::{
    CastCounts, CastError, CastOptions, CastReport, Caster, ExactTensors, TensorCast, is_exact,
    is_float,
};

use dcp_core::CheckpointMetadata;

use crate::error::JobError;

impl From<CastError> for JobError {
    fn from(error: CastError) -> Self {
        Self::NotCastable { fqn: error.fqn, problem: error.problem }
    }
}

/// The tensors of a checkpoint that keep their dtype when weights are cast.
#[must_use]
pub fn exact_tensors(metadata: &CheckpointMetadata) -> ExactTensors {
    ExactTensors::of(metadata.iter().filter_map(|(fqn, entry)| {
        let tensor = entry.as_tensor()?;
        Some((&**fqn, tensor.dtype, &*tensor.shape))
    }))
}

#[cfg(test)]
mod tests;
