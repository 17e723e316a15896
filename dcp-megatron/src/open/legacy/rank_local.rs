//! The entries of a rank's file besides the model and the random state.

use std::collections::BTreeSet;

use dcp_core::Value;
use dcp_core::path::PathItem;
use dcp_core::value::Dict;

use super::{File, RNG, is_model};
use crate::error::MegatronError;

/// Takes tensors of more than one element out of a rank's optimizer, and what is then empty, and
/// says whether there were any: they are of the rank's own parameters. Param groups, and numbers
/// such as the scale of gradients, are those of all ranks.
pub(super) fn strip(value: &mut Value) -> bool {
    let mut found = false;
    // What is stored as it was shows tensors too.
    if let Value::Opaque(opaque) = value {
        let mut view = opaque.view.clone();
        if !strip(&mut view) {
            return false;
        }
        *value = view;
        return true;
    }
    match value {
        Value::Dict(dict) => {
            let mut kept = Dict::new();
            for (key, item) in dict.iter_mut() {
                let is_groups = key.as_str() == Some("param_groups");
                if is_groups || !goes(item, &mut found) {
                    kept.insert(key.clone(), item.clone());
                }
            }
            *dict = kept;
        }
        Value::List(items) | Value::Tuple(items) => {
            items.retain_mut(|item| !goes(item, &mut found));
        }
        _ => {}
    }
    found
}

/// Whether nothing of a value stays.
fn goes(item: &mut Value, found: &mut bool) -> bool {
    if let Value::Tensor(tensor) = item {
        let is_large =
            dcp_core::dims::checked_volume(tensor.shape()).is_none_or(|volume| volume > 1);
        *found |= is_large;
        return is_large;
    }
    let stripped = strip(item);
    *found |= stripped;
    stripped && has_numbers_only(item)
}

/// Whether what is left of a parameter's state are numbers such as its step.
fn has_numbers_only(value: &Value) -> bool {
    match value {
        Value::Dict(dict) => dict.iter().all(|(_, item)| is_number(item)),
        Value::List(items) | Value::Tuple(items) => items.iter().all(is_number),
        _ => false,
    }
}

fn is_number(value: &Value) -> bool {
    matches!(value, Value::Tensor(_) | Value::Int(_) | Value::Float(_))
}

/// The outermost keys of a file that the first one does not have, or with another value. Arguments
/// name the rank, and what has tensors is not compared.
pub(super) async fn differing(
    file: &File,
    first: &Dict,
) -> Result<BTreeSet<String>, MegatronError> {
    let passed_over = |key: &str| is_model(key) || matches!(key, RNG | "args" | "optimizer");
    let known = |key: &str| first.get(key);
    let compared = |key: &str| !passed_over(key) && known(key).is_some_and(|v| !has_tensors(v));
    let mut differing = BTreeSet::new();
    for (key, value) in file.values(compared).await?.iter() {
        if let Some(key) = key.as_str()
            && known(key).is_some_and(|first| !first.same(value))
        {
            differing.insert(key.to_owned());
        }
    }
    for (_, entry) in file.source.metadata().await?.iter() {
        if let Some([PathItem::Key(key), ..]) = entry.path().map(|path| &**path)
            && !passed_over(key)
            && known(key).is_none_or(has_tensors)
        {
            differing.insert(key.to_string());
        }
    }
    Ok(differing)
}

fn has_tensors(value: &Value) -> bool {
    match value.view() {
        Value::Tensor(_) => true,
        Value::Dict(dict) => dict.iter().any(|(_, item)| has_tensors(item)),
        Value::List(items) | Value::Tuple(items) => items.iter().any(has_tensors),
        _ => false,
    }
}
