//! The error of saving or loading a module or an optimizer of burn.

use burn_store::burn_pack;
use dcp_core::CheckpointError;
use dcp_core::error::TensorError;
use dcp_core::text::{Message, Quoted};

/// A module or an optimizer of burn cannot be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BurnError {
    /// Checkpoints, or burn, do not have the element type.
    #[error("{dtype} tensors cannot pass between burn and checkpoints; cast {name}", name = Quoted(.name))]
    UnsupportedDType {
        /// The tensor.
        name: String,
        /// The element type.
        dtype: String,
    },
    /// A loaded tensor has shards, or is not in host memory.
    #[error("{name} is not whole in host memory", name = Quoted(.name))]
    NotWhole {
        /// The tensor.
        name: String,
    },
    /// The module does not take a loaded tensor.
    #[error("the module does not take what was loaded: {problem}", problem = Message(.problem))]
    Module {
        /// The message of burn.
        problem: String,
    },
    /// The loaded options or state are not those of this optimizer.
    #[error("the optimizer cannot continue with {key}: {problem}", key = Quoted(.key), problem = Message(.problem))]
    Optimizer {
        /// The option, or the parameter and the name of the state.
        key: String,
        /// The part that does not fit.
        problem: String,
    },
    /// The tensor does not have the size of its shape.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// An error of burn's own serialization.
    #[error("burn: {0}")]
    Pack(burn_pack::Error),
}

impl From<burn_pack::Error> for BurnError {
    fn from(error: burn_pack::Error) -> Self {
        Self::Pack(error)
    }
}

impl From<BurnError> for CheckpointError {
    fn from(error: BurnError) -> Self {
        match error {
            BurnError::Tensor(error) => error.into(),
            error => Self::application(error),
        }
    }
}
