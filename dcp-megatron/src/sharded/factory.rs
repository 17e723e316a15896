//! Sharded tensor factories: tensors that are split on a save and merged on a load.

use std::fmt;
use std::sync::Arc;

use dcp_core::Value;

use super::error::ShardError;
use super::local::LocalTensor;
use super::replica::ReplicaId;
use super::tree::ShardedValue;

/// Makes the shards of a tensor.
type Build = dyn Fn(&FactoryParts) -> Result<ShardedValue, ShardError> + Send + Sync;
/// Makes the tensor of its loaded shards.
type Merge = dyn Fn(&FactoryParts, Value) -> Result<Value, ShardError> + Send + Sync;

/// A tensor that is stored as others: on a save it is replaced by what `build` makes of it, on a
/// load what was read for that is replaced by what `merge` makes of it.
///
/// An optimizer clones the factory of a parameter for its states, with
/// [`with_key`](Self::with_key) and [`with_local`](Self::with_local), so that they are cut alike.
///
/// Factories of Megatron-Core up to 0.15 had a `flattened_range`, too: the optimizer's states were
/// ranges of flattened shards. One here takes none, and no factory here cuts a flattened shard. To
/// load such states, request the whole shard, as its parameter is cut, and take the range of what
/// was loaded: tensors that are stored flattened have their own shapes here.
#[derive(Clone)]
pub struct ShardedTensorFactory {
    parts: FactoryParts,
    build: Arc<Build>,
    merge: Arc<Merge>,
}

/// The input of a factory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FactoryParts {
    /// The key that the shards' keys are made of.
    pub key: Arc<str>,
    /// The tensor that is cut. When there is memory, shards are made of parts of it, and a load
    /// fills it in place.
    pub local: LocalTensor,
    /// The identifier of the shards' replica.
    pub replica_id: ReplicaId,
}

impl ShardedTensorFactory {
    /// A factory of `key` that cuts `local`.
    ///
    /// `build` is called on every save and load, and must make the same of the same; `merge` gets
    /// a dict, list or tensor where `build` made one, and a sharded object's data. Both may be
    /// called on any thread.
    pub fn new(
        key: impl Into<Arc<str>>,
        local: impl Into<LocalTensor>,
        build: impl Fn(&FactoryParts) -> Result<ShardedValue, ShardError> + Send + Sync + 'static,
        merge: impl Fn(&FactoryParts, Value) -> Result<Value, ShardError> + Send + Sync + 'static,
    ) -> Self {
        let parts =
            FactoryParts { key: key.into(), local: local.into(), replica_id: ReplicaId::MAIN };
        Self { parts, build: Arc::new(build), merge: Arc::new(merge) }
    }

    /// Sets the identifier of the shards' replica.
    #[must_use]
    pub fn with_replica_id(mut self, replica_id: impl Into<ReplicaId>) -> Self {
        self.parts.replica_id = replica_id.into();
        self
    }

    /// Replaces the key.
    #[must_use]
    pub fn with_key(mut self, key: impl Into<Arc<str>>) -> Self {
        self.parts.key = key.into();
        self
    }

    /// Replaces the tensor.
    #[must_use]
    pub fn with_local(mut self, local: impl Into<LocalTensor>) -> Self {
        self.parts.local = local.into();
        self
    }

    /// Its input.
    #[must_use]
    pub fn parts(&self) -> &FactoryParts {
        &self.parts
    }

    /// The parts that are stored for the tensor.
    ///
    /// # Errors
    ///
    /// Those of the factory's own function.
    pub fn build(&self) -> Result<ShardedValue, ShardError> {
        (self.build)(&self.parts)
    }

    /// The tensor of the shards in `loaded`.
    ///
    /// # Errors
    ///
    /// Those of the factory's own function.
    pub fn merge(&self, loaded: Value) -> Result<Value, ShardError> {
        (self.merge)(&self.parts, loaded)
    }
}

impl fmt::Debug for ShardedTensorFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedTensorFactory").field("parts", &self.parts).finish_non_exhaustive()
    }
}
