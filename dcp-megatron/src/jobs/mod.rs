//! Offline jobs on checkpoints of Megatron-Core.

pub(crate) mod describe;
mod plain_args;
pub(crate) mod remove;
pub(crate) mod to_torch_dist;
pub(crate) mod verify;

pub use describe::{Description, Layers, ObjectGroup, ParallelSizes, object_key};
pub use remove::{Removed, remove_sharded_tensors};
pub use to_torch_dist::to_torch_dist;
pub use verify::{verify, verify_opened, verify_with};
