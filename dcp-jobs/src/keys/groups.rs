//! Renames parameters in optimizer settings when keys are renamed.
//!
//! PyTorch's `get_optimizer_state_dict` writes `state.FQN.field` and, for each parameter group,
//! `param_groups.N.params`, a list of the same FQNs. `set_optimizer_state_dict` applies settings
//! only to the parameters in such a list.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{CheckpointMetadata, Value};

/// The dict of per-parameter state in an optimizer's state dict.
const STATE: &str = "state";
const GROUPS: &str = "param_groups";
/// The key of a group's list of parameters.
const PARAMS: &str = "params";

/// Renames the parameters of one optimizer.
pub(crate) struct RenamedParams<'a> {
    /// The prefix of the state keys, such as `optim.state.`, before and after renaming.
    states: (String, String),
    /// One state key of each parameter, by the parameter's prefix.
    keys: &'a HashMap<String, Arc<str>>,
}

/// One state key of each parameter, by its prefix: `optim.state.FQN` to `optim.state.FQN.field`.
pub(crate) fn keys_of_params(metadata: &CheckpointMetadata) -> HashMap<String, Arc<str>> {
    let keys = metadata.iter().filter_map(|(fqn, _)| {
        let (param, _field) = fqn.rsplit_once('.')?;
        let in_state = param.starts_with("state.") || param.contains(".state.");
        in_state.then(|| (param.to_owned(), Arc::clone(fqn)))
    });
    keys.collect()
}

impl<'a> RenamedParams<'a> {
    /// The renaming for the optimizer settings `fqn`, which become `renamed`. Returns `None` when
    /// either key is not one of settings.
    pub(crate) fn of(
        fqn: &str,
        renamed: &str,
        keys: &'a HashMap<String, Arc<str>>,
    ) -> Option<Self> {
        let states = |owner: &str| format!("{owner}{STATE}.");
        let (old, new) = (owner(fqn)?, owner(renamed)?);
        Some(Self { states: (states(old), states(new)), keys })
    }

    /// The value with the parameters renamed as `rename` renames their state keys. Returns `None`
    /// when nothing changes.
    pub(crate) fn apply(
        &self,
        value: &Value,
        rename: &dyn Fn(&str) -> Option<Arc<str>>,
    ) -> Option<Value> {
        let mut value = match value {
            Value::Opaque(opaque) => opaque.view.clone(),
            value => value.clone(),
        };
        let lists = match &mut value {
            Value::List(groups) if groups.iter().any(|group| matches!(group, Value::Dict(_))) => {
                let groups = groups.iter_mut().filter_map(|group| match group {
                    Value::Dict(group) => group.get_mut(PARAMS),
                    _ => None,
                });
                groups.collect()
            }
            value => vec![value],
        };
        let mut changed = false;
        for list in lists {
            let Value::List(names) = list else { continue };
            for name in names {
                let Value::Str(old) = name else { continue };
                if let Some(new) = self.param(old, rename).filter(|new| *new != **old) {
                    *name = Value::Str(new.into());
                    changed = true;
                }
            }
        }
        changed.then_some(value)
    }

    /// The new name of a parameter, derived from the new name of its state key.
    fn param(&self, param: &str, rename: &dyn Fn(&str) -> Option<Arc<str>>) -> Option<String> {
        let (old, new) = &self.states;
        let stem = format!("{old}{param}");
        // A parameter without state is renamed as its state key would be.
        let key = self.keys.get(&stem).map_or_else(|| format!("{stem}.step"), ToString::to_string);
        let field = key.strip_prefix(&stem)?;
        Some(rename(&key)?.strip_prefix(&**new)?.strip_suffix(field)?.to_owned())
    }
}

/// The prefix before `param_groups.N.params`, or before `param_groups` when it is one object.
fn owner(fqn: &str) -> Option<&str> {
    let groups = match fqn.strip_suffix(".params") {
        Some(rest) => {
            let (groups, number) = rest.rsplit_once('.')?;
            number.bytes().all(|byte| byte.is_ascii_digit()).then_some(groups)?
        }
        None => fqn,
    };
    groups.strip_suffix(GROUPS).filter(|owner| owner.is_empty() || owner.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use dcp_core::value::Dict;

    use super::*;

    fn list(names: &[&str]) -> Value {
        Value::List(names.iter().map(|name| Value::Str((*name).into())).collect())
    }

    #[test]
    fn names_of_parameters_follow_the_keys_of_their_state() {
        let key = |key: &str| (key.rsplit_once('.').unwrap().0.to_owned(), Arc::from(key));
        let keys = HashMap::from([key("o.state.m.a.b.exp_avg"), key("o.state.m.c.step")]);
        let rename = |key: &str| Some(Arc::from(key.replace("m.", "n.")));
        let apply = |fqn: &str, renamed: &str, value: &Value| {
            let made = RenamedParams::of(fqn, renamed, &keys)?.apply(value, &rename)?;
            Some(format!("{made:?}"))
        };
        let shown = |value: &Value| Some(format!("{value:?}"));
        let (one, all) = ("o.param_groups.0.params", "o.param_groups");
        // `m.d` has no state.
        let value = list(&["m.a.b", "m.c", "m.d"]);
        let expected = list(&["n.a.b", "n.c", "n.d"]);
        assert_eq!(apply(one, one, &value), shown(&expected));
        let group = |params| {
            let mut group = Dict::new();
            group.insert("params", params);
            Value::List(vec![Value::Dict(group)])
        };
        assert_eq!(apply(all, all, &group(value.clone())), shown(&group(expected)));
        assert_eq!(apply(one, one, &Value::List(vec![Value::Int(0)])), None);
        assert_eq!(apply(one, one, &list(&["x"])), None);
        // Settings that are none any more keep their names.
        assert_eq!(apply(one, "o.groups.0.params", &value), None);
        assert_eq!(apply("o.params", "o.params", &value), None);
    }
}
