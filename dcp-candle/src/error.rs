//! The error of saving or loading a tensor or an optimizer of candle.

use dcp_core::CheckpointError;
use dcp_core::error::TensorError;
use dcp_core::text::{Message, Quoted};

/// A tensor, model or optimizer of candle cannot be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CandleError {
    /// Checkpoints, or candle, do not have the element type.
    #[error("{dtype} tensors cannot pass between candle and checkpoints; cast the tensor")]
    UnsupportedDType {
        /// The name of the element type.
        dtype: String,
    },
    /// The elements are not in row-major order in one piece of memory.
    #[error("a tensor of shape {shape:?} is not contiguous; call `contiguous` on it first")]
    NotContiguous {
        /// The shape.
        shape: Vec<usize>,
    },
    /// The tensor has shards, or is on a device, where a whole tensor in host memory is needed.
    #[error("the tensor is not whole in host memory; load it as a replicated host tensor")]
    NotWhole,
    /// A copy begins or ends within an element.
    #[error("bytes {start}..{end} are not whole elements of {size} bytes")]
    PartOfElement {
        /// The first byte.
        start: u64,
        /// The byte after the last.
        end: u64,
        /// The size of an element.
        size: usize,
    },
    /// The `VarMap` has no variable of this name.
    #[error("the VarMap has no variable {name}", name = Quoted(.name))]
    UnknownVariable {
        /// The name.
        name: String,
    },
    /// The loaded options or state of an optimizer are not those of this optimizer.
    #[error("the optimizer cannot continue with {key}: {problem}", key = Quoted(.key), problem = Message(.problem))]
    Optimizer {
        /// The option or the name of the state.
        key: String,
        /// The part that does not fit.
        problem: String,
    },
    /// A shard has another shape than its variable, or is outside its tensor.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<CandleError> for CheckpointError {
    fn from(error: CandleError) -> Self {
        match error {
            CandleError::Tensor(error) => error.into(),
            error => Self::application(error),
        }
    }
}
