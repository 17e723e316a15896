//! Optimizer state in Megatron checkpoints: its formats, its parameters by name, and damage that
//! some versions did to it.

mod assign;
mod buffers;
mod by_parameter;
mod check;
mod format;
mod groups;
mod join;
mod keys;
mod layout;
mod parameter_search;
mod registration;
mod repair;
mod report;
mod shards;
mod shift;
mod window;

pub use by_parameter::{PerParameter, per_parameter, per_parameter_of_legacy};
pub use check::{
    CheckDepth, MismatchCause, OptimizerReport, OptimizerVerdict, ParamMismatch, SAMPLED_CHUNKS,
    SAMPLED_ELEMENTS, check_optimizer,
};
pub use format::OptimizerFormat;
pub use join::SettingsDifference;
pub(crate) use keys::{ParamStateKey, group_of, model_parallel_groups};
pub use keys::{StateKind, is_optimizer_key};
pub use layout::{ALIGNMENT, FlatBucket, FlatLayoutOptions, FlatParam, flat_layout};
pub use repair::{Restarted, restart_optimizer};
pub use report::{AmbiguousPlace, LayoutReport, PerParameterReport, PlacedParam, UnknownPlace};
