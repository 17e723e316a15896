//! Splits a request into stored leaves and factories.

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_core::CheckpointMetadata;

use crate::sharded::{
    Placed, ShardError, ShardedLeaf, ShardedStateDict, ShardedTensorFactory, ShardedValue, Step,
    build, leaves_of, sharded_leaves,
};

/// The entries that a rank requests, prepared for reading.
#[derive(Debug, Default)]
pub(crate) struct ToLoad {
    /// Tensors and objects, those of factories too, and local values.
    pub(crate) tree: ShardedStateDict,
    /// The factories, each with its part of the tree.
    pub(crate) factories: Vec<Placed>,
    /// Keys that were requested and are not stored.
    pub(crate) unexpected: BTreeSet<Arc<str>>,
    /// Keys that are stored and were requested, but only by factories of which another part is
    /// not.
    pub(crate) left_out: BTreeSet<Arc<str>>,
}

/// Removes plain values from a request and, with `stored`, leaves that are not stored, a factory as
/// a whole. Builds the other factories.
///
/// A list closes up over removed elements. So a factory gets its new place: merging it at its old
/// one would overwrite the element that moved there.
pub(crate) fn to_load(
    request: &ShardedStateDict,
    stored: Option<&CheckpointMetadata>,
) -> Result<ToLoad, ShardError> {
    let mut walk = Walk { stored, path: Vec::new(), wanted: ToLoad::default() };
    let tree = walk.dict(request)?;
    let mut wanted = ToLoad { tree, ..walk.wanted };
    if !wanted.left_out.is_empty() {
        for leaf in sharded_leaves(&wanted.tree) {
            wanted.left_out.remove(key_of(leaf));
        }
    }
    Ok(wanted)
}

/// Whether a leaf can be read.
pub(crate) fn is_stored(leaf: ShardedLeaf<'_>, stored: &CheckpointMetadata) -> bool {
    match leaf {
        ShardedLeaf::Tensor(tensor) => stored.get(tensor.key()).is_some(),
        ShardedLeaf::Object(object) => stored.get(&object.unique_key()).is_some(),
    }
}

fn key_of(leaf: ShardedLeaf<'_>) -> &Arc<str> {
    match leaf {
        ShardedLeaf::Tensor(tensor) => tensor.key(),
        ShardedLeaf::Object(object) => object.key(),
    }
}

struct Walk<'a> {
    stored: Option<&'a CheckpointMetadata>,
    /// The place of the next value.
    path: Vec<Step>,
    wanted: ToLoad,
}

impl Walk<'_> {
    fn dict(&mut self, dict: &ShardedStateDict) -> Result<ShardedStateDict, ShardError> {
        let mut kept = ShardedStateDict::new();
        for (key, value) in dict.iter() {
            if let Some(value) = self.at(Step::Key(key.clone()), value)? {
                kept.insert(key.clone(), value);
            }
        }
        Ok(kept)
    }

    fn at(&mut self, step: Step, value: &ShardedValue) -> Result<Option<ShardedValue>, ShardError> {
        self.path.push(step);
        let kept = self.value(value)?;
        self.path.pop();
        Ok(kept)
    }

    fn value(&mut self, value: &ShardedValue) -> Result<Option<ShardedValue>, ShardError> {
        Ok(match value {
            ShardedValue::Dict(dict) => {
                Some(self.dict(dict)?).filter(|kept| !kept.is_empty()).map(ShardedValue::from)
            }
            ShardedValue::List(items) => {
                let mut kept = Vec::with_capacity(items.len());
                for item in items {
                    let item = self.at(Step::Index(kept.len()), item)?;
                    kept.extend(item);
                }
                Some(kept).filter(|kept| !kept.is_empty()).map(ShardedValue::from)
            }
            ShardedValue::Tensor(_) | ShardedValue::Object(_) => {
                self.all_stored(value).then(|| value.clone())
            }
            ShardedValue::Factory(factory) => self.factory(factory)?,
            ShardedValue::Local(_) => Some(value.clone()),
            ShardedValue::Plain(_) => None,
        })
    }

    fn factory(
        &mut self,
        factory: &ShardedTensorFactory,
    ) -> Result<Option<ShardedValue>, ShardError> {
        let built = build(factory)?;
        if !self.all_stored(&built) {
            return Ok(None);
        }
        self.wanted.factories.push(Placed { path: self.path.clone(), factory: factory.clone() });
        // A factory without stored parts merges nothing.
        Ok(Some(without_plain(built).unwrap_or_else(|| Vec::new().into())))
    }

    /// Whether all of a value can be read; notes its keys where not.
    fn all_stored(&mut self, value: &ShardedValue) -> bool {
        let Some(stored) = self.stored else { return true };
        let leaves = leaves_of(value).into_iter();
        let (there, absent): (Vec<_>, Vec<_>) = leaves.partition(|leaf| is_stored(*leaf, stored));
        if absent.is_empty() {
            return true;
        }
        let keys = |leaves: Vec<ShardedLeaf<'_>>| {
            leaves.into_iter().map(|leaf| Arc::clone(key_of(leaf))).collect::<Vec<_>>()
        };
        self.wanted.unexpected.extend(keys(absent));
        self.wanted.left_out.extend(keys(there));
        false
    }
}

fn without_plain(value: ShardedValue) -> Option<ShardedValue> {
    match value {
        ShardedValue::Dict(dict) => {
            let kept =
                dict.into_iter().filter_map(|(key, value)| Some((key, without_plain(value)?)));
            let kept: ShardedStateDict = kept.collect();
            (!kept.is_empty()).then(|| kept.into())
        }
        ShardedValue::List(items) => {
            let kept: Vec<_> = items.into_iter().filter_map(without_plain).collect();
            (!kept.is_empty()).then(|| kept.into())
        }
        ShardedValue::Plain(_) => None,
        leaf => Some(leaf),
    }
}
