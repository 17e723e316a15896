//! What plans refer to in the metadata.

use dcp_core::{CheckpointError, CheckpointMetadata, DType, PlanError};

/// A plan or a message that does not fit the metadata.
pub(crate) fn bad(problem: &str) -> CheckpointError {
    PlanError::Wire { problem: problem.to_owned() }.into()
}

/// The dtype of the tensor that a plan reads.
pub(crate) fn tensor_dtype(
    metadata: &CheckpointMetadata,
    entry: u32,
) -> Result<DType, CheckpointError> {
    let tensor = metadata.at(entry as usize).and_then(|(_, entry)| entry.as_tensor());
    Ok(tensor.ok_or_else(|| bad("a plan reads a tensor that is an object"))?.dtype)
}
