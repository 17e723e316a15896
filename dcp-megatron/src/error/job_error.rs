//! Errors of Megatron-Core as those of jobs.

use dcp_core::CheckpointError;
use dcp_jobs::{Error, ErrorKind};

use super::MegatronError;

impl From<MegatronError> for Error {
    fn from(error: MegatronError) -> Self {
        let (kind, hint) = match error {
            MegatronError::Checkpoint(error) => return error.into(),
            MegatronError::Convert(error) => return error.into(),
            MegatronError::FlatOptimizer { .. } => (
                ErrorKind::Unsupported,
                "`StatePart::WithoutOptimizer` leaves it out; `OptimizerForm::PerParameter` \
                 separates the parameters in the buffers apart by their values",
            ),
            MegatronError::Indivisible { what: "layers", .. } => (
                ErrorKind::Unsupported,
                "choose another `MegatronTarget::pp`, or say how many layers the first or the \
                 last stage has: `PipelineSplit::decoder_first_pipeline_num_layers`, \
                 `PipelineSplit::decoder_last_pipeline_num_layers`",
            ),
            MegatronError::Layout { .. } | MegatronError::Indivisible { .. } => (
                ErrorKind::Unsupported,
                "choose other sizes for `MegatronTarget::tp`, `MegatronTarget::pp` and `MegatronTarget::ep`",
            ),
            MegatronError::NotACheckpoint { .. } => {
                return Self::of(ErrorKind::NotACheckpoint, error);
            }
            other => return Self::of(ErrorKind::Damaged, other),
        };
        Self::of(kind, error).with_hint(hint)
    }
}

impl From<MegatronError> for CheckpointError {
    /// A plug-in's error keeps its kind and advice on the way through a format.
    fn from(error: MegatronError) -> Self {
        match error {
            MegatronError::Checkpoint(error) => error,
            MegatronError::NotACheckpoint { message } => Self::NotACheckpoint { message },
            error => Self::Plugin(Box::new(Error::from(error))),
        }
    }
}
