//! What goes wrong with checkpoints of Megatron-Core.

use dcp_convert::ConvertError;
use dcp_core::{CheckpointError, FormatError, PlanError, StorageError};

/// A checkpoint of Megatron-Core could not be read, written or understood.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MegatronError {
    /// The checkpoint beneath, or the place it lies in.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A leaf of a sharded state dict contradicts itself.
    #[error(transparent)]
    Shard(#[from] crate::sharded::ShardError),
    /// An offline job on it.
    #[error(transparent)]
    Convert(#[from] ConvertError),
}

impl From<StorageError> for MegatronError {
    fn from(error: StorageError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<PlanError> for MegatronError {
    fn from(error: PlanError) -> Self {
        Self::Checkpoint(error.into())
    }
}

impl From<FormatError> for MegatronError {
    fn from(error: FormatError) -> Self {
        Self::Checkpoint(error.into())
    }
}
