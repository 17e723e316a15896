//! Optimizer state in Megatron's checkpoints: its formats, the parameters in them by name, and
//! the damage that some versions did to it.

mod check;
mod format;
mod keys;
mod shift;

pub use check::{
    CheckDepth, MismatchCause, OptimizerReport, OptimizerVerdict, ParamMismatch, SAMPLED_CHUNKS,
    SAMPLED_ELEMENTS, check_optimizer,
};
pub use format::OptimizerFormat;
pub use keys::{StateKind, is_optimizer_key};
