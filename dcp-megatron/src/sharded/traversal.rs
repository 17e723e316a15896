//! Traverses and merges sharded state dicts by Megatron-Core's rules.

use dcp_core::Value;
use dcp_core::value::Dict;

use super::error::ShardError;
use super::factory::ShardedTensorFactory;
use super::object::ShardedObject;
use super::tensor::ShardedTensor;
use super::tree::{ShardedStateDict, ShardedValue};
use super::value_path::step;

/// Divides a state dict into what `wanted` takes and the rest, both nested as before.
///
/// A container goes where it still holds something; one that was empty stays with the rest. Lists
/// are closed up, so positions shift where elements went to the other side. An empty container in
/// a list is requested as a leaf is. `wanted` is never called for containers that hold something,
/// but for plain ones, which are taken as one value.
#[must_use]
#[doc(alias = "extract_matching_values")]
pub fn extract(
    state: ShardedStateDict,
    mut wanted: impl FnMut(&ShardedValue) -> bool,
) -> (ShardedStateDict, ShardedStateDict) {
    extract_dict(state, &mut wanted)
}

fn extract_dict(
    dict: ShardedStateDict,
    wanted: &mut dyn FnMut(&ShardedValue) -> bool,
) -> (ShardedStateDict, ShardedStateDict) {
    let (mut matching, mut rest) = (ShardedStateDict::new(), ShardedStateDict::new());
    for (key, value) in dict {
        if is_tree(&value) {
            let was_empty = is_empty(&value);
            let (found, other) = extract_value(value, wanted);
            if !is_empty(&found) {
                matching.insert(key.clone(), found);
            }
            if was_empty || !is_empty(&other) {
                rest.insert(key, other);
            }
        } else if wanted(&value) {
            matching.insert(key, value);
        } else {
            rest.insert(key, value);
        }
    }
    (matching, rest)
}

fn extract_value(
    value: ShardedValue,
    wanted: &mut dyn FnMut(&ShardedValue) -> bool,
) -> (ShardedValue, ShardedValue) {
    let items = match value {
        ShardedValue::Dict(dict) => {
            let (found, other) = extract_dict(dict, wanted);
            return (found.into(), other.into());
        }
        ShardedValue::List(items) => items,
        leaf => return (ShardedValue::List(Vec::new()), leaf),
    };
    let (mut matching, mut rest) = (Vec::new(), Vec::new());
    for item in items {
        if is_tree(&item) && !is_empty(&item) {
            let (found, other) = extract_value(item, wanted);
            matching.extend(Some(found).filter(|found| !is_empty(found)));
            rest.extend(Some(other).filter(|other| !is_empty(other)));
        } else if wanted(&item) {
            matching.push(item);
        } else {
            rest.push(item);
        }
    }
    (matching.into(), rest.into())
}

/// Whether it is a container that may hold sharded values.
fn is_tree(value: &ShardedValue) -> bool {
    matches!(value, ShardedValue::Dict(_) | ShardedValue::List(_))
}

fn is_empty(value: &ShardedValue) -> bool {
    match value {
        ShardedValue::Dict(dict) => dict.is_empty(),
        ShardedValue::List(items) => items.is_empty(),
        _ => false,
    }
}

/// Adds what `from` holds to `into`: dicts are united, lists of equal length are merged element by
/// element.
///
/// # Errors
///
/// [`ShardError::Merge`] where lists differ in length, or anything else is on both sides. `into`
/// is then partly merged.
pub fn merge(into: &mut Dict, from: Dict) -> Result<(), ShardError> {
    merge_dicts(into, from, &mut Vec::new())
}

fn merge_dicts(into: &mut Dict, from: Dict, path: &mut Vec<String>) -> Result<(), ShardError> {
    for (key, value) in from {
        match into.get_value_mut(&key) {
            None => {
                into.insert(key, value);
            }
            Some(there) => {
                path.push(step(&key));
                merge_values(there, value, path)?;
                path.pop();
            }
        }
    }
    Ok(())
}

fn merge_values(into: &mut Value, from: Value, path: &mut Vec<String>) -> Result<(), ShardError> {
    match (into, from) {
        (Value::Dict(into), Value::Dict(from)) => merge_dicts(into, from, path),
        (Value::List(into), Value::List(from)) if into.len() == from.len() => {
            for (index, (into, from)) in into.iter_mut().zip(from).enumerate() {
                path.push(index.to_string());
                merge_values(into, from, path)?;
                path.pop();
            }
            Ok(())
        }
        (Value::List(into), Value::List(from)) => refuse_lists(path, into.len(), from.len()),
        (into, from) => refuse(path, format!("there is a {} and a {}", into.kind(), from.kind())),
    }
}

/// Finds what [`merge`] would refuse once the leaves of `from` are loaded. What an object turns out
/// to be is not known, so it only collides with what takes in nothing.
pub(crate) fn check_merge(into: &Dict, from: &ShardedStateDict) -> Result<(), ShardError> {
    check_dicts(into, from, &mut Vec::new())
}

fn check_dicts(
    into: &Dict,
    from: &ShardedStateDict,
    path: &mut Vec<String>,
) -> Result<(), ShardError> {
    for (key, value) in from.iter() {
        if let Some(there) = into.get_value(key) {
            path.push(step(key));
            check_values(there, value, path)?;
            path.pop();
        }
    }
    Ok(())
}

fn check_values(
    into: &Value,
    from: &ShardedValue,
    path: &mut Vec<String>,
) -> Result<(), ShardError> {
    let from = match (into, from) {
        (Value::Dict(into), ShardedValue::Dict(from)) => return check_dicts(into, from, path),
        (Value::List(into), ShardedValue::List(from)) if into.len() == from.len() => {
            for (index, (into, from)) in into.iter().zip(from).enumerate() {
                path.push(index.to_string());
                check_values(into, from, path)?;
                path.pop();
            }
            return Ok(());
        }
        (Value::List(into), ShardedValue::List(from)) => {
            return refuse_lists(path, into.len(), from.len());
        }
        (into, ShardedValue::Local(local)) => {
            return merge_values(&mut into.clone(), local.0.clone(), path);
        }
        (Value::Dict(_) | Value::List(_), ShardedValue::Object(_)) => return Ok(()),
        (_, ShardedValue::Dict(_)) => "dict",
        (_, ShardedValue::List(_)) => "list",
        (_, ShardedValue::Object(_)) => "sharded object",
        _ => "tensor",
    };
    refuse(path, format!("there is a {} and a {from}", into.kind()))
}

fn refuse(path: &[String], problem: String) -> Result<(), ShardError> {
    Err(ShardError::Merge { path: path.join("."), problem })
}

fn refuse_lists(path: &[String], into: usize, from: usize) -> Result<(), ShardError> {
    let problem = format!(
        "the lists have {into} and {from} elements; a list must not mix sharded and plain ones"
    );
    refuse(path, problem)
}

/// A step on the way to a leaf.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Key(Value),
    Index(usize),
}

/// A factory and where its result belongs.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) path: Vec<Step>,
    pub(crate) factory: ShardedTensorFactory,
}

/// Replaces each factory by the shards that it builds, and returns the factories.
pub(crate) fn apply_factories(
    state: &ShardedStateDict,
) -> Result<(ShardedStateDict, Vec<Placed>), ShardError> {
    let mut placed = Vec::new();
    let expanded = expand_dict(state, &mut Vec::new(), &mut placed)?;
    Ok((expanded, placed))
}

fn expand_dict(
    dict: &ShardedStateDict,
    path: &mut Vec<Step>,
    placed: &mut Vec<Placed>,
) -> Result<ShardedStateDict, ShardError> {
    dict.iter()
        .map(|(key, value)| {
            path.push(Step::Key(key.clone()));
            let expanded = expand(value, path, placed)?;
            path.pop();
            Ok((key.clone(), expanded))
        })
        .collect()
}

fn expand(
    value: &ShardedValue,
    path: &mut Vec<Step>,
    placed: &mut Vec<Placed>,
) -> Result<ShardedValue, ShardError> {
    Ok(match value {
        ShardedValue::Dict(dict) => expand_dict(dict, path, placed)?.into(),
        ShardedValue::List(items) => {
            let expanded = items.iter().enumerate().map(|(index, item)| {
                path.push(Step::Index(index));
                let expanded = expand(item, path, placed)?;
                path.pop();
                Ok(expanded)
            });
            expanded.collect::<Result<Vec<_>, ShardError>>()?.into()
        }
        ShardedValue::Factory(factory) => {
            let built = build(factory)?;
            placed.push(Placed { path: path.clone(), factory: factory.clone() });
            built
        }
        leaf => leaf.clone(),
    })
}

/// The parts of a factory, none of which may be a factory.
pub(crate) fn build(factory: &ShardedTensorFactory) -> Result<ShardedValue, ShardError> {
    let built = factory.build()?;
    if holds_factory(&built) {
        return Err(ShardError::Factory {
            key: factory.parts().key.to_string(),
            problem: "it built another factory".to_owned(),
        });
    }
    Ok(built)
}

fn holds_factory(value: &ShardedValue) -> bool {
    match value {
        ShardedValue::Dict(dict) => dict.iter().any(|(_, value)| holds_factory(value)),
        ShardedValue::List(items) => items.iter().any(holds_factory),
        ShardedValue::Factory(_) => true,
        _ => false,
    }
}

/// Replaces loaded shards by the tensors that their factories make.
pub(crate) fn apply_factory_merges(loaded: &mut Dict, placed: &[Placed]) -> Result<(), ShardError> {
    for Placed { path, factory } in placed {
        let slot = at(loaded, path).ok_or_else(|| ShardError::Factory {
            key: factory.parts().key.to_string(),
            problem: format!("what was loaded has no {}", shown(path)),
        })?;
        *slot = factory.merge(std::mem::replace(slot, Value::None))?;
    }
    Ok(())
}

fn at<'a>(dict: &'a mut Dict, path: &[Step]) -> Option<&'a mut Value> {
    let (Step::Key(first), rest) = path.split_first()? else { return None };
    rest.iter().try_fold(dict.get_value_mut(first)?, |value, step| match (value, step) {
        (Value::Dict(dict), Step::Key(key)) => dict.get_value_mut(key),
        (Value::List(items), Step::Index(index)) => items.get_mut(*index),
        _ => None,
    })
}

fn shown(path: &[Step]) -> String {
    let steps = path.iter().map(|part| match part {
        Step::Key(key) => step(key),
        Step::Index(index) => index.to_string(),
    });
    steps.collect::<Vec<_>>().join(".")
}

/// A leaf that is stored under a key of its own.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ShardedLeaf<'a> {
    /// A shard of a tensor.
    Tensor(&'a ShardedTensor),
    /// An object.
    Object(&'a ShardedObject),
}

/// The sharded tensors and objects of a state dict in its order; what factories make is not
/// among them.
#[must_use]
pub fn sharded_leaves(state: &ShardedStateDict) -> Vec<ShardedLeaf<'_>> {
    let mut leaves = Vec::new();
    state.iter().for_each(|(_, value)| gather(value, &mut leaves));
    leaves
}

/// Returns the sharded tensors and objects of one value, as [`sharded_leaves`] does of a state
/// dict.
pub(crate) fn leaves_of(value: &ShardedValue) -> Vec<ShardedLeaf<'_>> {
    let mut leaves = Vec::new();
    gather(value, &mut leaves);
    leaves
}

fn gather<'a>(value: &'a ShardedValue, leaves: &mut Vec<ShardedLeaf<'a>>) {
    match value {
        ShardedValue::Dict(dict) => dict.iter().for_each(|(_, value)| gather(value, leaves)),
        ShardedValue::List(items) => items.iter().for_each(|item| gather(item, leaves)),
        ShardedValue::Tensor(tensor) => leaves.push(ShardedLeaf::Tensor(tensor)),
        ShardedValue::Object(object) => leaves.push(ShardedLeaf::Object(object)),
        _ => {}
    }
}

/// The places of lists whose elements are on different sides: sharded, plain, or not stored.
pub(crate) fn mixed_lists(state: &ShardedStateDict) -> Vec<String> {
    let (mut found, mut path) = (Vec::new(), Vec::new());
    for (key, value) in state.iter() {
        path.push(step(key));
        find_mixed(value, &mut path, &mut found);
        path.pop();
    }
    found
}

/// The sides of a division that a value has parts on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sides {
    sharded: bool,
    plain: bool,
    local: bool,
}

impl Sides {
    fn and(self, other: Self) -> Self {
        Self {
            sharded: self.sharded || other.sharded,
            plain: self.plain || other.plain,
            local: self.local || other.local,
        }
    }
}

fn find_mixed(value: &ShardedValue, path: &mut Vec<String>, found: &mut Vec<String>) -> Sides {
    let nothing = Sides::default();
    match value {
        ShardedValue::Dict(dict) => {
            let mut sides = Sides { plain: dict.is_empty(), ..nothing };
            for (key, value) in dict.iter() {
                path.push(step(key));
                sides = sides.and(find_mixed(value, path, found));
                path.pop();
            }
            sides
        }
        ShardedValue::List(items) => {
            let mut of_items = Vec::with_capacity(items.len());
            for (index, item) in items.iter().enumerate() {
                path.push(index.to_string());
                of_items.push(find_mixed(item, path, found));
                path.pop();
            }
            let sides = of_items.iter().fold(nothing, |all, item| all.and(*item));
            // Each side gets a list, closed up; they fit again only where nothing moved.
            if of_items.iter().any(|item| *item != sides) {
                found.push(path.join("."));
            }
            Sides { plain: sides.plain || items.is_empty(), ..sides }
        }
        ShardedValue::Plain(_) => Sides { plain: true, ..nothing },
        ShardedValue::Local(_) => Sides { local: true, ..nothing },
        _ => Sides { sharded: true, ..nothing },
    }
}

/// The tree as plain values, every leaf as `leaf` has it.
pub(crate) fn to_values(
    state: &ShardedStateDict,
    leaf: &mut dyn FnMut(&ShardedValue) -> Result<Value, ShardError>,
) -> Result<Dict, ShardError> {
    state.iter().map(|(key, value)| Ok((key.clone(), to_value(value, leaf)?))).collect()
}

fn to_value(
    value: &ShardedValue,
    leaf: &mut dyn FnMut(&ShardedValue) -> Result<Value, ShardError>,
) -> Result<Value, ShardError> {
    match value {
        ShardedValue::Dict(dict) => Ok(to_values(dict, leaf)?.into()),
        ShardedValue::List(items) => {
            let items = items.iter().map(|item| to_value(item, leaf));
            Ok(items.collect::<Result<Vec<_>, _>>()?.into())
        }
        other => leaf(other),
    }
}
