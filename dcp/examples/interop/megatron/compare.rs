//! Whether what was loaded is what was saved.

use dcp::Value;
use dcp::core::value::Dict;
use serde_json::Value as Json;

use super::part::Wanted;
use crate::{Result, expected};

/// Fails unless what was `wanted` is in a loaded state, bit for bit; what else is there is the
/// common state.
pub(super) fn compare(state: &Dict, wanted: &[(Vec<Value>, Wanted)]) -> Result<Dict> {
    for (path, wanted) in wanted {
        let found = at(state, path).ok_or_else(|| format!("{path:?} is not there"))?;
        let equal = match (wanted, found) {
            (Wanted::Tensor { dtype, shape, bytes }, Value::Tensor(tensor)) => {
                tensor.dtype() == *dtype
                    && **tensor.shape() == **shape
                    && tensor.to_vec().as_ref() == Some(bytes)
            }
            (Wanted::Object(json), value) => expected::matches(value.view(), json),
            (Wanted::Value(wanted), value) => wanted.same(value),
            _ => false,
        };
        if !equal {
            return Err(format!("{path:?} is {found:?}").into());
        }
    }
    let taken: Vec<&[Value]> = wanted.iter().map(|(path, _)| &path[..]).collect();
    Ok(rest(state, &mut Vec::new(), &taken))
}

fn at<'a>(state: &'a Dict, path: &[Value]) -> Option<&'a Value> {
    let (first, path) = path.split_first()?;
    path.iter().try_fold(state.get_value(first)?, |value, name| match (value, name) {
        (Value::Dict(dict), name) => dict.get_value(name),
        (Value::List(items), Value::Int(n)) => items.get(usize::try_from(*n).ok()?),
        _ => None,
    })
}

fn begins(path: &[Value], with: &[Value]) -> bool {
    path.len() >= with.len() && path.iter().zip(with).all(|(one, other)| one.same(other))
}

fn same(one: &[Value], other: &[Value]) -> bool {
    one.len() == other.len() && begins(one, other)
}

/// A dict without the paths that are `taken`, nor the containers that held nothing else.
fn rest(dict: &Dict, path: &mut Vec<Value>, taken: &[&[Value]]) -> Dict {
    let mut kept = Dict::new();
    for (name, value) in dict.iter() {
        path.push(name.clone());
        if !taken.iter().any(|taken| same(taken, path)) {
            match value {
                Value::Dict(inner) if !inner.is_empty() => {
                    let inner = rest(inner, path, taken);
                    if !inner.is_empty() {
                        kept.insert(name.clone(), inner);
                    }
                }
                Value::List(_) if taken.iter().any(|taken| begins(taken, path)) => {}
                value => {
                    kept.insert(name.clone(), value.clone());
                }
            }
        }
        path.pop();
    }
    kept
}

/// Fails unless a common state is what the tagged JSON says, in whatever order.
pub(super) fn compare_common(found: &Dict, json: &Json) -> Result {
    let pairs = json.get("v").and_then(Json::as_array).ok_or("no common state")?;
    for pair in pairs {
        let name = pair.get(0).and_then(Json::as_str).unwrap_or_default();
        let value = found.get(name).ok_or_else(|| format!("no {name} in the common state"))?;
        if !pair.get(1).is_some_and(|json| expected::matches(value.view(), json)) {
            return Err(format!("{name} is {value:?} in the common state, not {pair}").into());
        }
    }
    if found.len() != pairs.len() {
        let names: Vec<_> = found.iter().map(|(name, _)| name).collect();
        return Err(format!("{names:?} are in the common state, not {json}").into());
    }
    Ok(())
}
