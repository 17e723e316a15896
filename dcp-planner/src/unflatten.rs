//! Flat leaves back into a nested state dict: PyTorch's `set_element` (unchanged since 2.0).

use dcp_core::error::StateProblem;
use dcp_core::path::PathItem;
use dcp_core::value::{Dict, python_str};
use dcp_core::{PlanError, StateDict, Value};

use crate::flatten::MAX_DEPTH;

/// Elements of lists that may be filled up with `None` although nothing is stored for them:
/// PyTorch leaves such gaps where a list held empty dicts.
const MAX_PADDING: u64 = 65_536;

/// Builds a nested state dict of leaves and their paths, in order.
///
/// Containers are made on the way, dicts for text and lists for numbers, and lists are filled up
/// with `None`. What flattening lost stays lost: empty dicts, and the types of keys and
/// containers. A leaf without a nested place gets a path of one step, its flat name.
///
/// # Errors
///
/// [`StateProblem::PathConflict`] when a path is empty, leads through a leaf, meets another leaf's
/// place, treats a dict as a list or the reverse, or calls for lists that are mostly gaps;
/// [`StateProblem::TooDeep`] when it is longer than 512 steps.
pub fn unflatten<P: AsRef<[PathItem]>>(
    leaves: impl IntoIterator<Item = (P, Value)>,
) -> Result<StateDict, PlanError> {
    let mut state = StateDict::new();
    let mut padding = MAX_PADDING;
    for (path, value) in leaves {
        let path = path.as_ref();
        let slot = slot(&mut state, path, Keys::Text, &mut padding)?;
        if !slot.vacant {
            return Err(refuse(path, "something else has the same place"));
        }
        *slot.value = value;
    }
    Ok(state)
}

/// Puts a value at its place in a nested state dict, and replaces one that is there.
///
/// An entry of a dict is found by the text of its key, so that a state dict with numbers as keys
/// takes back what was flattened out of it; PyTorch 2.15 adds a second entry under the text.
///
/// # Errors
///
/// As [`unflatten`], but for the place being taken.
pub fn set_at_path(
    state: &mut StateDict,
    path: &[PathItem],
    value: Value,
) -> Result<(), PlanError> {
    let mut padding = MAX_PADDING;
    *slot(state, path, Keys::Any, &mut padding)?.value = value;
    Ok(())
}

/// The keys that a dict may have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    /// Text only, as in a dict that was made here.
    Text,
    /// Any, as in a dict of the caller.
    Any,
}

struct Slot<'a> {
    value: &'a mut Value,
    /// Nothing was ever put there.
    vacant: bool,
}

/// The place at the end of `path`, with the containers on the way to it.
fn slot<'a>(
    state: &'a mut StateDict,
    path: &[PathItem],
    keys: Keys,
    padding: &mut u64,
) -> Result<Slot<'a>, PlanError> {
    if path.len() > MAX_DEPTH {
        let fqn = PathItem::flat_name(path.get(..16).unwrap_or_default());
        return Err(StateProblem::TooDeep { limit: MAX_DEPTH }.of(fqn));
    }
    let Some((PathItem::Key(first), steps)) = path.split_first() else {
        return Err(refuse(path, "its path does not begin with a key"));
    };
    let mut place = entry(state, first, keys).ok_or_else(|| refuse(path, "it has no place"))?;
    for (position, step) in steps.iter().enumerate() {
        if place.vacant {
            *place.value = match step {
                PathItem::Key(_) => Value::Dict(Dict::new()),
                PathItem::Index(_) => Value::List(Vec::new()),
            };
        }
        let found = match (place.value, step) {
            (Value::Dict(dict), PathItem::Key(key)) => entry(dict, key, keys),
            (Value::List(items), PathItem::Index(index)) => element(items, *index, padding),
            (Value::Object(object), PathItem::Key(key)) => object
                .entries
                .iter_mut()
                .find(|(known, _)| prints_as(known, key))
                .map(|(_, value)| Slot { value, vacant: false }),
            (other, _) => {
                let through = PathItem::flat_name(path.get(..=position).unwrap_or_default());
                return Err(refuse(path, &format!("{through:?} is a {}", other.kind())));
            }
        };
        place = found.ok_or_else(|| match step {
            PathItem::Key(key) => refuse(path, &format!("there is no entry {key:?}")),
            PathItem::Index(index) => refuse(path, &format!("list index {index} leaves a gap")),
        })?;
    }
    Ok(place)
}

fn entry<'a>(dict: &'a mut Dict, key: &str, keys: Keys) -> Option<Slot<'a>> {
    let vacant = dict.get(key).is_none();
    if vacant {
        let same = match keys {
            Keys::Text => None,
            Keys::Any => dict.iter().position(|(known, _)| prints_as(known, key)),
        };
        if let Some(at) = same {
            return dict.iter_mut().nth(at).map(|(_, value)| Slot { value, vacant: false });
        }
        dict.insert(key, Value::None);
    }
    dict.get_mut(key).map(|value| Slot { value, vacant })
}

fn prints_as(key: &Value, text: &str) -> bool {
    python_str(key).is_some_and(|printed| printed == text)
}

/// An element that is `None` counts as vacant, because lists are filled up with it.
fn element<'a>(items: &'a mut Vec<Value>, index: u64, padding: &mut u64) -> Option<Slot<'a>> {
    let index = usize::try_from(index).ok()?;
    let gap = index.saturating_sub(items.len()) as u64;
    *padding = padding.checked_sub(gap)?;
    if index >= items.len() {
        items.resize(index.checked_add(1)?, Value::None);
    }
    items.get_mut(index).map(|value| Slot { vacant: matches!(value, Value::None), value })
}

fn refuse(path: &[PathItem], problem: &str) -> PlanError {
    StateProblem::PathConflict { problem: problem.to_owned() }.of(PathItem::flat_name(path))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::flatten::{FlattenRule, flatten};

    fn key(key: &str) -> PathItem {
        PathItem::Key(key.into())
    }

    fn at(index: u64) -> PathItem {
        PathItem::Index(index)
    }

    #[test]
    fn lists_are_filled_up_with_none() {
        let state = unflatten([
            (vec![key("l"), at(2), key("a")], Value::from(1)),
            (vec![key("l"), at(0)], Value::from(2)),
        ])
        .unwrap();
        let Some(Value::List(items)) = state.get("l") else { panic!("{state:?}") };
        assert!(matches!(&items[..], [Value::Int(2), Value::None, Value::Dict(_)]));
    }

    #[test]
    fn contradictions_are_refused() {
        let refused = |leaves: &[(&[PathItem], Value)]| {
            unflatten(leaves.iter().map(|(path, value)| (path, value.clone()))).is_err()
        };
        assert!(refused(&[(&[key("a")], 1.into()), (&[key("a"), key("b")], 2.into())]));
        assert!(refused(&[(&[key("a"), key("b")], 1.into()), (&[key("a")], 2.into())]));
        assert!(refused(&[(&[key("a")], Value::None), (&[key("a")], 2.into())]));
        assert!(refused(&[(&[key("a"), at(0)], 1.into()), (&[key("a"), key("b")], 2.into())]));
        assert!(refused(&[(&[], 1.into())]));
        assert!(refused(&[(&[at(0)], 1.into())]));
    }

    #[test]
    fn hostile_paths_are_refused() {
        assert!(unflatten([([key("a"), at(1 << 60)], Value::None)]).is_err());
        assert!(unflatten([([key("a"), at(u64::MAX)], Value::None)]).is_err());
        let each = (0..100).map(|n| ([key(&n.to_string()), at(60_000)], Value::None));
        assert!(unflatten(each).is_err(), "the gaps of all lists count together");
        let deep: Vec<_> = std::iter::repeat_n(at(0), 1 << 20).collect();
        assert!(unflatten([([&[key("a")], &*deep].concat(), Value::None)]).is_err());
    }

    #[test]
    fn t17_numbers_as_keys_take_back_what_was_flattened() {
        let inner = Dict::from([(Value::from(0), Value::from("old"))]);
        let mut state = StateDict::from([("state", inner)]);
        let flat: Vec<_> = flatten(&state, FlattenRule::Torch24)
            .unwrap()
            .iter()
            .map(|leaf| Arc::clone(leaf.path.as_ref().unwrap()))
            .collect();
        set_at_path(&mut state, &flat[0], "new".into()).unwrap();
        let inner = state.get("state").unwrap().as_dict().unwrap();
        assert_eq!(inner.len(), 1);
        assert_eq!(inner.get_value(&0.into()).unwrap().as_str(), Some("new"));
    }
}
