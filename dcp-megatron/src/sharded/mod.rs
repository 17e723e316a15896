//! Megatron-Core's sharded state dicts: each rank's parts of the global tensors and objects.
//!
//! A [`ShardedStateDict`] is a nested tree of dicts and lists. Its leaves are [`ShardedTensor`]s
//! and [`ShardedObject`]s, which are stored under global keys independent of where they sit in the
//! tree; [`ShardedTensorFactory`]s, which are cut into those on a save and put together again on a
//! load; [`LocalNonpersistentObject`]s, which are not saved; and plain values, which make up the
//! common state, the same on all ranks.

mod builder;
mod error;
mod factories;
mod factory;
mod integrity;
mod local;
mod object;
mod problem;
mod rank_shards;
mod replica;
mod tensor;
mod traversal;
mod tree;
mod value_path;

pub use builder::ShardedTensorBuilder;
pub use error::ShardError;
pub use factories::{ExpertGrid, grouped_experts, named_split, swiglu};
pub use factory::{FactoryParts, ShardedTensorFactory};
pub use integrity::validate_sharding_integrity;
pub use local::LocalTensor;
pub use object::{ObjectKey, ShardedObject};
pub use problem::{IntegrityError, ShardingProblem};
pub use rank_shards::RankShards;
pub use replica::ReplicaId;
pub use tensor::ShardedTensor;
pub(crate) use traversal::{
    Placed, Step, apply_factories, apply_factory_merges, build, check_merge, leaves_of,
    mixed_lists, to_values,
};
pub use traversal::{ShardedLeaf, extract, merge, sharded_leaves};
pub use tree::{LocalNonpersistentObject, ShardedStateDict, ShardedValue};
pub(crate) use value_path::{culprit, step};
