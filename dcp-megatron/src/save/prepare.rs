//! Splits a sharded state dict into tensors, objects and common state.

use std::sync::Arc;

use dcp_core::error::StateProblem;
use dcp_core::value::Dict;
use dcp_core::{PlanError, Region, Shard, StateDict, Tensor, Value};

use crate::error::{MegatronError, PlanRefusal};
use crate::sharded::{
    ShardError, ShardedLeaf, ShardedStateDict, ShardedTensor, ShardedValue, apply_factories,
    extract, mixed_lists, sharded_leaves, to_values,
};

/// The state that a rank saves, divided into sharded entries and the common state.
#[derive(Debug)]
pub(crate) struct ToSave {
    /// Tensors and objects.
    pub(crate) sharded: ShardedStateDict,
    /// Everything else.
    pub(crate) common: Dict,
}

/// Expands factories, drops what is not stored, and divides the rest.
pub(crate) fn to_save(
    state: &ShardedStateDict,
    allow_mixed_lists: bool,
) -> Result<ToSave, MegatronError> {
    let (expanded, _) = apply_factories(state)?;
    let mixed = mixed_lists(&expanded);
    if !mixed.is_empty() && !allow_mixed_lists {
        return Err(MegatronError::MixedLists { paths: mixed });
    }
    let is_local = |value: &ShardedValue| matches!(value, ShardedValue::Local(_));
    let (_, stored) = extract(expanded, is_local);
    let (sharded, common) = extract(stored, ShardedValue::is_sharded);
    let common = to_values(&common, &mut |leaf| match leaf {
        ShardedValue::Plain(value) => Ok(value.clone()),
        _ => Ok(Value::None),
    })?;
    Ok(ToSave { sharded, common })
}

/// The main replicas of a rank as the engine saves them: tensors by key, objects by unique key.
pub(crate) fn flat(sharded: &ShardedStateDict) -> Result<StateDict, MegatronError> {
    let mut tensors: Vec<(Arc<str>, Vec<&ShardedTensor>)> = Vec::new();
    let mut at = std::collections::HashMap::new();
    let mut flat = StateDict::new();
    for leaf in sharded_leaves(sharded) {
        match leaf {
            ShardedLeaf::Tensor(tensor) if tensor.replica_id().is_main() => {
                let key = tensor.key();
                let slot = *at.entry(Arc::clone(key)).or_insert_with(|| {
                    tensors.push((Arc::clone(key), Vec::new()));
                    tensors.len() - 1
                });
                if let Some((_, shards)) = tensors.get_mut(slot) {
                    shards.push(tensor);
                }
            }
            ShardedLeaf::Object(object) if object.replica_id().is_main() => {
                let key = object.unique_key();
                let data = object.data().ok_or_else(|| without_data(&key))?.clone();
                match flat.get_mut(&key) {
                    // As Megatron-Core does: one entry, a list of all of them.
                    Some(Value::List(all)) => all.push(data),
                    _ => {
                        flat.insert(key, Value::List(vec![data]));
                    }
                }
            }
            _ => {}
        }
    }
    for (key, shards) in tensors {
        let Some(first) = shards.first() else { continue };
        let parts = shards.iter().map(|shard| to_shard(shard)).collect::<Result<_, _>>()?;
        let tensor = Tensor::sharded(first.dtype(), first.global_shape().clone(), parts);
        let tensor = tensor.map_err(|error| error.with_fqn(&*key))?;
        if flat.insert(Arc::clone(&key), tensor).is_some() {
            return Err(one_name(&key).into());
        }
    }
    Ok(flat)
}

fn to_shard(tensor: &ShardedTensor) -> Result<Shard, MegatronError> {
    if let Some(range) = tensor.flattened_range() {
        return Err(ShardError::Flattened {
            key: tensor.key().to_string(),
            start: range.start,
            end: range.end,
            problem: "flattened ranges are no longer saved, because Megatron-Core 0.16 and later \
                      cannot load them; gather the shard and save it whole"
                .to_owned(),
        }
        .into());
    }
    let data = tensor.global_data().ok_or_else(|| without_data(tensor.key()))?;
    let shard = Shard::with_view(tensor.region().clone(), data);
    Ok(shard.map_err(|error| error.with_fqn(&**tensor.key()))?)
}

fn without_data(key: &str) -> PlanRefusal {
    PlanRefusal::NoData { key: key.to_owned() }
}

/// A tensor is named as the unique key of an object is.
pub(crate) fn one_name(key: &str) -> PlanError {
    StateProblem::Duplicate.of(key)
}

/// The boxes of a block that hold elements `start..end` of it in row-major order, and the element
/// of the range that each begins with. Together they are at most two for each axis.
pub(crate) fn boxes_of_range(block: &Region, start: u64, end: u64) -> Vec<(u64, Region)> {
    let mut boxes = Vec::new();
    let sizes = block.sizes();
    let mut at = start;
    while at < end {
        // The longest box from here: as many whole slices as fit of the outermost axis that `at`
        // is at the beginning of a slice of.
        let (mut axis, mut slice) = (sizes.ndim(), 1_u64);
        while let Some(next) = axis.checked_sub(1) {
            let larger = slice.saturating_mul(sizes[next]);
            if !at.is_multiple_of(larger) || end - at < larger {
                break;
            }
            (axis, slice) = (next, larger);
        }
        let mut offsets = block.offsets().clone();
        let mut extent = sizes.clone();
        let mut rest = at / slice;
        let count = match axis.checked_sub(1) {
            None => 1,
            Some(last) => {
                let index = rest % sizes[last];
                let count = (sizes[last] - index).min((end - at) / slice).max(1);
                for outer in (0..axis).rev() {
                    offsets[outer] += rest % sizes[outer];
                    rest /= sizes[outer];
                    extent[outer] = if outer == last { count } else { 1 };
                }
                count
            }
        };
        if let Ok(region) = Region::new(offsets, extent) {
            boxes.push((at - start, region));
        }
        at = at.saturating_add(count.saturating_mul(slice));
    }
    boxes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_are_cut_into_boxes_that_hold_their_elements_in_order(
            sizes in prop::collection::vec(1_u64..5, 0..4),
            ends in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
        ) {
            let volume = sizes.iter().product::<u64>();
            let (a, b) = (ends.0.index(volume as usize + 1), ends.1.index(volume as usize + 1));
            let (start, end) = (a.min(b) as u64, a.max(b) as u64);
            let offsets: Vec<u64> = sizes.iter().map(|size| size + 1).collect();
            let block = Region::new(offsets, sizes.clone()).unwrap();
            let boxes = boxes_of_range(&block, start, end);
            let mut next = start;
            for (first, region) in &boxes {
                prop_assert_eq!(first + start, next);
                let inner = region.relative_to(block.offsets()).unwrap();
                for (at, len) in inner.runs_in(&sizes) {
                    prop_assert_eq!(at, next, "{} of {}", inner, block);
                    next += len;
                }
            }
            prop_assert_eq!(next, end);
            prop_assert!(boxes.len() <= 2 * sizes.len().max(1));
        }
    }
}
