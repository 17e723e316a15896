//! The nested tree of a sharded state dict.

use std::hash::{Hash, Hasher};

use dcp_core::Value;
use dcp_core::value::Dict;
use indexmap::IndexMap;

use super::factory::ShardedTensorFactory;
use super::object::ShardedObject;
use super::tensor::ShardedTensor;

/// A node of a sharded state dict.
///
/// Dicts and lists are containers; everything else is a leaf, tuples included. A plain value may be
/// a container of plain values itself.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ShardedValue {
    /// A dict.
    Dict(ShardedStateDict),
    /// A list. One that holds sharded and plain elements side by side cannot be loaded by
    /// Megatron-Core.
    List(Vec<ShardedValue>),
    /// A shard of a tensor.
    Tensor(ShardedTensor),
    /// An object that is not the same on all ranks.
    Object(ShardedObject),
    /// A tensor that is stored as others.
    Factory(ShardedTensorFactory),
    /// Something that is not stored.
    Local(LocalNonpersistentObject),
    /// A part of the common state, the same on all ranks; ignored in the request of a load.
    Plain(Value),
}

/// A value that is not saved and that a load puts back in its place.
#[derive(Clone, Debug)]
pub struct LocalNonpersistentObject(pub Value);

/// A dict of a sharded state dict, in the order of insertion; keys are whatever Python can hash.
///
/// ```
/// use dcp_core::{DType, Value};
/// use dcp_megatron::sharded::{LocalTensor, ShardedStateDict, ShardedTensor, ShardedValue};
///
/// let weight = ShardedTensor::from_rank_offsets("weight", LocalTensor::described(DType::Float32, [4]))
///     .offset(0, 1, 2)
///     .build()?;
/// let mut state = ShardedStateDict::new();
/// state.insert("iteration", Value::Int(10));
/// // As Python's `setdefault`, wherever the parts of a nested dict come from.
/// if let ShardedValue::Dict(model) = state.get_or_insert_with("model", ShardedStateDict::new) {
///     model.insert("weight", weight);
/// }
/// assert!(matches!(state.get("model"), Some(ShardedValue::Dict(model)) if model.len() == 1));
/// # Ok::<(), dcp_megatron::sharded::ShardError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ShardedStateDict(IndexMap<NodeKey, ShardedValue>);

#[derive(Clone, Debug)]
struct NodeKey(Value);

impl Hash for NodeKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match &self.0 {
            Value::Str(text) => text.hash(state),
            Value::Int(n) => n.hash(state),
            // Rare as keys: all of a kind share a bucket, equality distinguishes them.
            other => std::mem::discriminant(other).hash(state),
        }
    }
}

impl PartialEq for NodeKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.same(&other.0)
    }
}

impl Eq for NodeKey {}

impl ShardedStateDict {
    /// An empty dict.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sets `key`, keeping its place if it is already there, and returns the value it had.
    pub fn insert(
        &mut self,
        key: impl Into<Value>,
        value: impl Into<ShardedValue>,
    ) -> Option<ShardedValue> {
        self.0.insert(NodeKey(key.into()), value.into())
    }

    /// The value of a string key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&ShardedValue> {
        self.get_value(&key.into())
    }

    /// The value of a key of any kind.
    #[must_use]
    pub fn get_value(&self, key: &Value) -> Option<&ShardedValue> {
        self.0.get(&NodeKey(key.clone()))
    }

    /// The value of a string key, to change.
    #[must_use]
    pub fn get_mut(&mut self, key: &str) -> Option<&mut ShardedValue> {
        self.get_value_mut(&key.into())
    }

    /// The value of a key of any kind, to change.
    #[must_use]
    pub fn get_value_mut(&mut self, key: &Value) -> Option<&mut ShardedValue> {
        self.0.get_mut(&NodeKey(key.clone()))
    }

    /// The value of a key, to change; where there is none yet, what `make` returns is put there.
    #[doc(alias = "entry")]
    #[doc(alias = "setdefault")]
    pub fn get_or_insert_with<V: Into<ShardedValue>>(
        &mut self,
        key: impl Into<Value>,
        make: impl FnOnce() -> V,
    ) -> &mut ShardedValue {
        self.0.entry(NodeKey(key.into())).or_insert_with(|| make().into())
    }

    /// Removes a key, keeping the order of the rest.
    pub fn remove(&mut self, key: &str) -> Option<ShardedValue> {
        self.0.shift_remove(&NodeKey(key.into()))
    }

    /// Keys and values in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Value, &ShardedValue)> {
        self.0.iter().map(|(key, value)| (&key.0, value))
    }

    /// Keys and values in order, values to change.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = (&Value, &mut ShardedValue)> {
        self.0.iter_mut().map(|(key, value)| (&key.0, value))
    }
}

impl IntoIterator for ShardedStateDict {
    type Item = (Value, ShardedValue);
    type IntoIter = std::vec::IntoIter<Self::Item>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter().map(|(key, value)| (key.0, value)).collect::<Vec<_>>().into_iter()
    }
}

impl<K: Into<Value>, V: Into<ShardedValue>> FromIterator<(K, V)> for ShardedStateDict {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        Self(entries.into_iter().map(|(k, v)| (NodeKey(k.into()), v.into())).collect())
    }
}

impl<K: Into<Value>, V: Into<ShardedValue>, const N: usize> From<[(K, V); N]> for ShardedStateDict {
    fn from(entries: [(K, V); N]) -> Self {
        entries.into_iter().collect()
    }
}

impl From<Dict> for ShardedStateDict {
    fn from(dict: Dict) -> Self {
        dict.into_iter().collect()
    }
}

impl ShardedValue {
    /// The dict, if it is one.
    #[must_use]
    pub fn as_dict(&self) -> Option<&ShardedStateDict> {
        if let Self::Dict(dict) = self { Some(dict) } else { None }
    }

    /// The dict, if it is one, to change.
    #[must_use]
    pub fn as_dict_mut(&mut self) -> Option<&mut ShardedStateDict> {
        if let Self::Dict(dict) = self { Some(dict) } else { None }
    }

    /// Whether it is a dict or a list, also of plain values.
    #[must_use]
    pub fn is_container(&self) -> bool {
        matches!(self, Self::Dict(_) | Self::List(_) | Self::Plain(Value::Dict(_) | Value::List(_)))
    }

    /// Whether it is stored under a key of its own.
    #[must_use]
    pub fn is_sharded(&self) -> bool {
        matches!(self, Self::Tensor(_) | Self::Object(_) | Self::Factory(_))
    }
}

macro_rules! from {
    ($($from:ty => $variant:ident;)*) => {$(
        impl From<$from> for ShardedValue {
            fn from(value: $from) -> Self {
                Self::$variant(value)
            }
        }
    )*};
}

from! {
    ShardedStateDict => Dict;
    Vec<ShardedValue> => List;
    ShardedTensor => Tensor;
    ShardedObject => Object;
    ShardedTensorFactory => Factory;
    LocalNonpersistentObject => Local;
    Value => Plain;
}
