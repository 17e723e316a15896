//! Refusing an index that makes no sense, before anything is written from it.

use dcp_core::{CheckpointMetadata, PlanError};
use dcp_planner::validate_metadata;

use crate::error::ConvertError;

/// Fails with everything that is wrong with an index.
pub(crate) fn refuse_unsound(metadata: &CheckpointMetadata) -> Result<(), ConvertError> {
    let mut problems = validate_metadata(metadata);
    match problems.len() {
        0 => Ok(()),
        1 => Err(problems.remove(0).into()),
        _ => Err(PlanError::Many(problems).into()),
    }
}
