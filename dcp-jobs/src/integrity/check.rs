//! Refuses an inconsistent index before a job writes anything.

use dcp_core::{CheckpointMetadata, PlanError};
use dcp_planner::validate_metadata;

use crate::error::JobError;

/// Fails with all inconsistencies of an index.
pub(crate) fn refuse_unsound(metadata: &CheckpointMetadata) -> Result<(), JobError> {
    let mut problems = validate_metadata(metadata);
    match problems.len() {
        0 => Ok(()),
        1 => Err(problems.remove(0).into()),
        _ => Err(PlanError::Many(problems).into()),
    }
}
