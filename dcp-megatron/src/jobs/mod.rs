//! Offline jobs on checkpoints of Megatron-Core.

pub(crate) mod describe;
pub(crate) mod plain_args;
pub(crate) mod remove;
pub(crate) mod to_torch_dist;
pub(crate) mod verify;
