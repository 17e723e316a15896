//! Compares the common states of ranks.

use dcp_core::digest::Sha256;
use dcp_core::value::{Dict, Object};
use dcp_core::{PlanError, Value};

use crate::error::CommonDifference;
use crate::sharded::step;

/// A digest that is the same for states that differ in no more than the order of dicts.
pub(crate) fn digest(common: &Dict) -> Result<[u8; 32], PlanError> {
    let mut hasher = Sha256::new();
    hash_dict(common, &mut hasher)?;
    Ok(hasher.finish())
}

fn hash_dict(dict: &Dict, hasher: &mut Sha256) -> Result<(), PlanError> {
    let entries = dict.iter().map(|(key, value)| {
        let mut entry = Sha256::new();
        hash_value(key, &mut entry)?;
        hash_value(value, &mut entry)?;
        Ok(entry.finish())
    });
    let mut entries = entries.collect::<Result<Vec<[u8; 32]>, PlanError>>()?;
    entries.sort_unstable();
    hasher.update(b"dict");
    hasher.update((entries.len() as u64).to_le_bytes());
    entries.iter().for_each(|entry| hasher.update(entry));
    Ok(())
}

fn hash_value(value: &Value, hasher: &mut Sha256) -> Result<(), PlanError> {
    if let Value::Object(object) = value
        && let Some(state) = &object.state
    {
        hasher.update(b"object");
        hash_value(&without_state(object).into(), hasher)?;
        return hash_value(state, hasher);
    }
    match value {
        Value::Dict(dict) => hash_dict(dict, hasher),
        Value::List(items) => {
            hasher.update(b"list");
            hasher.update((items.len() as u64).to_le_bytes());
            items.iter().try_for_each(|item| hash_value(item, hasher))
        }
        leaf => {
            let bytes = leaf.to_wire()?;
            hasher.update(b"leaf");
            hasher.update_with_length(&bytes);
            Ok(())
        }
    }
}

/// All of an object but its attributes.
fn without_state(object: &Object) -> Object {
    let mut rest = Object::new(object.class.clone(), object.args.clone());
    rest.made_by = object.made_by;
    rest.items.clone_from(&object.items);
    rest.entries.clone_from(&object.entries);
    rest
}

/// The attributes of two objects that may differ in nothing else, such as the arguments of runs.
fn attributes<'a>(first: &'a Object, here: &'a Object) -> Option<(&'a Dict, &'a Dict)> {
    let attributes = first.state.as_ref()?.as_dict().zip(here.state.as_ref()?.as_dict())?;
    let alike = Value::from(without_state(first)).same(&without_state(here).into());
    alike.then_some(attributes)
}

/// Compares the common state `here` with `first`, that of rank 0.
pub(crate) fn compare(first: &Dict, here: &Dict) -> CommonDifference {
    let mut difference = CommonDifference::default();
    compare_dicts(first, here, &mut Vec::new(), &mut difference);
    difference
}

fn compare_dicts(
    first: &Dict,
    here: &Dict,
    path: &mut Vec<String>,
    difference: &mut CommonDifference,
) {
    for (key, value) in first.iter() {
        path.push(step(key));
        match here.get_value(key) {
            Some(other) => compare_values(value, other, path, difference),
            None => difference.note(|d| &mut d.only_first, path),
        }
        path.pop();
    }
    for (key, _) in here.iter().filter(|(key, _)| first.get_value(key).is_none()) {
        path.push(step(key));
        difference.note(|d| &mut d.only_here, path);
        path.pop();
    }
}

fn compare_values(
    first: &Value,
    here: &Value,
    path: &mut Vec<String>,
    difference: &mut CommonDifference,
) {
    if let (Value::Object(first), Value::Object(here)) = (first, here)
        && let Some((first, here)) = attributes(first, here)
    {
        return compare_dicts(first, here, path, difference);
    }
    match (first, here) {
        (Value::Dict(first), Value::Dict(here)) => compare_dicts(first, here, path, difference),
        (Value::List(first), Value::List(here)) if first.len() == here.len() => {
            for (index, (first, here)) in first.iter().zip(here).enumerate() {
                path.push(index.to_string());
                compare_values(first, here, path, difference);
                path.pop();
            }
        }
        (first, here) if first.same(here) => {}
        _ => difference.note(|d| &mut d.values, path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{CommonDiffers, LISTED};

    #[test]
    fn differences_are_told_by_path() {
        let inner = |lr: f64| Dict::from([("lr", Value::Float(lr)), ("kind", "cosine".into())]);
        let first = Dict::from([
            ("opt", Value::List(vec![inner(0.1).into(), inner(0.2).into()])),
            ("iteration", 3.into()),
        ]);
        let here = Dict::from([
            ("rank", Value::Int(1)),
            ("opt", Value::List(vec![inner(0.1).into(), inner(0.3).into()])),
        ]);
        let found = compare(&first, &here);
        assert_eq!(found.values, ["opt.1.lr"]);
        assert_eq!(
            (&found.only_first, &found.only_here),
            (&vec!["iteration".to_owned()], &vec!["rank".to_owned()])
        );
        let text = CommonDiffers { ranks: vec![(5, found)] }.to_string();
        assert!(
            text.contains("rank 5 has other values at opt.1.lr, has no iteration, alone has rank"),
            "{text}"
        );
    }

    #[test]
    fn the_order_of_dicts_is_no_difference() {
        let a = Dict::from([("x", 1), ("y", 2)]);
        let b = Dict::from([("y", 2), ("x", 1)]);
        assert_eq!(digest(&a).unwrap(), digest(&b).unwrap());
        assert!(compare(&a, &b).is_empty());
        let c = Dict::from([("x", 2), ("y", 1)]);
        assert_ne!(digest(&a).unwrap(), digest(&c).unwrap());
        let nested =
            |n: i64| Dict::from([("l", Value::List(vec![Value::Int(n), a.clone().into()]))]);
        assert_ne!(digest(&nested(1)).unwrap(), digest(&nested(2)).unwrap());
    }

    #[test]
    fn very_many_differences_are_counted() {
        let first: Dict = (0..200).map(|n| (Value::Int(n), Value::Int(0))).collect();
        let found = compare(&first, &Dict::new());
        assert_eq!(
            (found.only_first.len() as u64 + found.more, found.only_first.len()),
            (200, LISTED)
        );
    }
}
