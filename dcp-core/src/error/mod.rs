//! One error type per layer, each saying what was tried, on what, and what to do next.

mod checkpoint;
mod collective;
mod format;
mod kind;
mod plan;
mod storage;
mod text;

pub use crate::tensors::error::TensorError;
pub use checkpoint::{CheckpointError, Phase, RankFailure, Standing};
pub use collective::CollectiveError;
pub use format::FormatError;
pub use kind::FailureKind;
pub use plan::{
    ChunksProblem, DataProblem, PlanError, PlanMaker, PlanProblem, PlanSubject, PlannerProblem,
    PluginError, RanksProblem, StateProblem, WantedKind,
};
pub use storage::{StorageError, StorageErrorKind, StorageOp};

type Source = Box<dyn std::error::Error + Send + Sync>;

/// An error and its causes in one line, as it is sent to other ranks and printed.
#[must_use]
pub fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_small() {
        assert!(size_of::<StorageError>() <= 96);
        assert!(size_of::<FormatError>() <= 96);
    }

    /// T19: PyTorch's `CheckpointException` is a `BaseException`, which `except Exception` misses.
    #[test]
    fn t19_errors_are_ordinary_errors() {
        fn through_any_handler() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            let failure = RankFailure::new(3, FailureKind::Other, "disk full");
            Err(CheckpointError::Ranks { phase: Phase::Write, failures: vec![failure] })?
        }
        let error = through_any_handler().unwrap_err();
        assert_eq!(error.to_string(), "write failed on rank 3: disk full");
    }

    #[test]
    fn a_format_error_moves_into_its_file_once() {
        let error = FormatError::new("pickle", "memo bomb").at(5).in_file("a", 100).in_file("b", 7);
        assert_eq!(error.to_string(), "bad pickle in \"a\" at byte 105: memo bomb");
    }
}
