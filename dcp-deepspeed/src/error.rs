//! Errors of checkpoints of DeepSpeed.

use dcp_core::{CheckpointError, FormatError};
use dcp_jobs::JobError;

/// A problem of the files together.
pub(crate) fn bad(problem: impl Into<String>) -> CheckpointError {
    FormatError::new("checkpoint of DeepSpeed", problem).into()
}

/// A problem of one file.
pub(crate) fn bad_file(file: &str, problem: impl Into<String>) -> CheckpointError {
    FormatError::new("checkpoint of DeepSpeed", problem).of_item(file).into()
}

/// An error of a view.
pub(crate) fn of_job(error: JobError) -> CheckpointError {
    match error {
        JobError::Checkpoint(error) => error,
        other => CheckpointError::Plugin(Box::new(other)),
    }
}
