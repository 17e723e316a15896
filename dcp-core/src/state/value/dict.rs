//! Dicts in insertion order.

use std::fmt;
use std::hash::{Hash, Hasher};

use indexmap::{Equivalent, IndexMap};

use super::{Value, python_str};

/// A dict in insertion order, like Python's.
#[derive(Clone, Default)]
pub struct Dict(IndexMap<DictKey, Value>);

#[derive(Clone, Debug)]
struct DictKey(Value);

struct StrKey<'a>(&'a str);

impl Dict {
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

    /// Sets `key`, in its place if it exists, and returns the old value.
    pub fn insert(&mut self, key: impl Into<Value>, value: impl Into<Value>) -> Option<Value> {
        self.0.insert(DictKey(key.into()), value.into())
    }

    /// The value of a string key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(&StrKey(key))
    }

    /// The value of a string key, mutable.
    #[must_use]
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Value> {
        self.0.get_mut(&StrKey(key))
    }

    /// The value of a key of any kind.
    #[must_use]
    pub fn get_value(&self, key: &Value) -> Option<&Value> {
        self.0.get(&DictKey(key.clone()))
    }

    /// The value of a key of any kind, mutable.
    #[must_use]
    pub fn get_value_mut(&mut self, key: &Value) -> Option<&mut Value> {
        self.0.get_mut(&DictKey(key.clone()))
    }

    /// The value at a dotted path through dicts and lists: the name that flattening gives it.
    ///
    /// Steps have no escapes, so a key may have dots of its own. Of several paths with this name,
    /// which a save refuses, the first one counts.
    ///
    /// ```
    /// use dcp_core::{StateDict, Value};
    ///
    /// let layer = StateDict::from([("mlp.weight", 1)]);
    /// let state = StateDict::from([("layers", Value::from(vec![layer]))]);
    /// assert_eq!(state.at("layers.0.mlp.weight").and_then(Value::as_int), Some(1));
    /// assert!(state.at("layers.1").is_none());
    /// ```
    #[must_use]
    pub fn at(&self, fqn: &str) -> Option<&Value> {
        let path = positions(self, fqn, 0)?;
        let (first, rest) = path.split_last()?;
        let mut value = self.0.get_index(*first)?.1;
        for position in rest.iter().rev() {
            value = match value {
                Value::Dict(dict) => dict.0.get_index(*position)?.1,
                Value::List(items) => items.get(*position)?,
                _ => return None,
            };
        }
        Some(value)
    }

    /// The value at a dotted path, mutable; see [`at`](Self::at).
    #[must_use]
    pub fn at_mut(&mut self, fqn: &str) -> Option<&mut Value> {
        let path = positions(self, fqn, 0)?;
        let (first, rest) = path.split_last()?;
        let mut value = self.0.get_index_mut(*first)?.1;
        for position in rest.iter().rev() {
            value = match value {
                Value::Dict(dict) => dict.0.get_index_mut(*position)?.1,
                Value::List(items) => items.get_mut(*position)?,
                _ => return None,
            };
        }
        Some(value)
    }

    /// Removes a string key and keeps the order of the rest.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        self.0.shift_remove(&StrKey(key))
    }

    /// Keys and values in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&Value, &Value)> {
        self.0.iter().map(|(key, value)| (&key.0, value))
    }

    /// Keys and mutable values, in order.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = (&Value, &mut Value)> {
        self.0.iter_mut().map(|(key, value)| (&key.0, value))
    }
}

/// The maximum nesting depth of a value that a dotted path leads to, as in flattening.
const MAX_DEPTH: usize = 512;

/// The positions of the steps to the value of a name, innermost first.
fn positions(dict: &Dict, name: &str, depth: usize) -> Option<Vec<usize>> {
    dict.0.iter().enumerate().find_map(|(position, (key, value))| {
        let rest = match &key.0 {
            Value::Str(text) => name.strip_prefix(&**text)?,
            other => name.strip_prefix(&*python_str(other)?)?,
        };
        steps_below(position, value, rest, depth)
    })
}

/// The positions from a value at `position` to the one with the rest of the name.
fn steps_below(position: usize, value: &Value, rest: &str, depth: usize) -> Option<Vec<usize>> {
    if rest.is_empty() {
        return Some(vec![position]);
    }
    let rest = rest.strip_prefix('.').filter(|_| depth < MAX_DEPTH)?;
    let mut path = match value {
        Value::Dict(dict) => positions(dict, rest, depth + 1)?,
        Value::List(items) => {
            let step = rest.split('.').next()?;
            let index = step.parse().ok().filter(|index: &usize| index.to_string() == step)?;
            steps_below(index, items.get(index)?, &rest[step.len()..], depth + 1)?
        }
        _ => return None,
    };
    path.push(position);
    Some(path)
}

impl fmt::Debug for Dict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl IntoIterator for Dict {
    type Item = (Value, Value);
    type IntoIter = std::vec::IntoIter<(Value, Value)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter().map(|(key, value)| (key.0, value)).collect::<Vec<_>>().into_iter()
    }
}

impl<K: Into<Value>, V: Into<Value>> FromIterator<(K, V)> for Dict {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        Self(entries.into_iter().map(|(k, v)| (DictKey(k.into()), v.into())).collect())
    }
}

impl<K: Into<Value>, V: Into<Value>, const N: usize> From<[(K, V); N]> for Dict {
    fn from(entries: [(K, V); N]) -> Self {
        entries.into_iter().collect()
    }
}

impl Equivalent<DictKey> for StrKey<'_> {
    fn equivalent(&self, key: &DictKey) -> bool {
        matches!(&key.0, Value::Str(text) if **text == *self.0)
    }
}

impl Hash for StrKey<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

impl PartialEq for DictKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.same(&other.0)
    }
}

impl Eq for DictKey {}

impl Hash for DictKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        hash_key(&self.0, state);
    }
}

fn hash_key<H: Hasher>(key: &Value, state: &mut H) {
    match key {
        Value::Str(text) => text.hash(state),
        Value::Bool(b) => b.hash(state),
        Value::Int(n) => n.hash(state),
        Value::BigInt(n) => n.hash(state),
        Value::Float(x) => x.to_bits().hash(state),
        Value::Bytes(bytes) => bytes.hash(state),
        Value::Tuple(items) => items.iter().for_each(|item| hash_key(item, state)),
        Value::Global(global) => global.hash(state),
        // Rare as keys: all of a kind share a hash, and equality distinguishes them.
        other => std::mem::discriminant(other).hash(state),
    }
}
