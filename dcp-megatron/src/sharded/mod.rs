//! Megatron-Core's sharded state dicts: what each rank says about its part of the global tensors
//! and objects.
//!
//! A [`ShardedStateDict`] is a nested tree of dicts and lists. Its leaves are [`ShardedTensor`]s
//! and [`ShardedObject`]s, which are stored under global keys independent of where they sit in the
//! tree; [`ShardedTensorFactory`]s, which are cut into those on a save and put together again on a
//! load; [`LocalNonpersistentObject`]s, which are not saved; and plain values, which make up the
//! common state, the same on all ranks.

mod error;
mod factory;
mod object;
mod replica;
mod tensor;
mod tree;

pub use error::ShardError;
pub use factory::{FactoryParts, ShardedTensorFactory};
pub use object::{ObjectKey, ShardedObject};
pub use replica::ReplicaId;
pub use tensor::{LocalTensor, ShardedTensor, ShardedTensorBuilder};
pub use tree::{LocalNonpersistentObject, ShardedStateDict, ShardedValue};
