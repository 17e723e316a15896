//! The names of the common state: all of a state dict that is not sharded.

/// The file of the common state, up to Megatron-Core 0.18.
pub const COMMON_FILE: &str = "common.pt";
/// The object that the common state is since Megatron-Core 0.19: a list of one.
pub const COMMON_OBJECT: &str = "common_state/shard_0_1";
/// The entry that is the common state in the source of a
/// [`MegatronCheckpoint`](crate::MegatronCheckpoint), whatever its age.
pub const COMMON_STATE: &str = "common_state";

/// The place of a checkpoint's common state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommonPlace {
    /// In `common.pt` (Megatron-Core up to 0.18).
    File,
    /// Among the sharded objects (0.19 and later).
    Inside,
    /// In neither place, which only a tolerant reader takes.
    Nowhere,
}
