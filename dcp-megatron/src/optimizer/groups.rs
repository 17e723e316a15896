//! The part of an optimizer's state that is no tensor: parameter groups and steps, in the form
//! that goes with `fully_reshardable`.

use std::collections::BTreeMap;

use dcp_core::{Dict, Tensor, Value};

use super::format::OptimizerFormat;
use super::keys::GroupKey;

const OPTIMIZER: &str = "optimizer";
const GROUPS: &str = "param_groups";

/// What objects beside the buffers say, by group and by their name.
pub(super) type GroupObjects = BTreeMap<GroupKey, Vec<(String, Value)>>;

/// The common state of a checkpoint whose optimizer becomes `fully_reshardable`.
pub(super) fn fully_reshardable(common: &Dict, objects: &GroupObjects) -> Dict {
    let mut common = common.clone();
    let format = OptimizerFormat::FullyReshardable.name();
    // Without these, Megatron looks for what the version that saved the checkpoint wrote: before
    // 0.13 for another format, before 0.15 for keys with the number of the chained optimizer.
    let content = common.get("content_metadata").and_then(Value::as_dict);
    let mut content = content.cloned().unwrap_or_default();
    content.insert("distrib_optim_sharding_type", format);
    content.insert("distrib_optim_fully_reshardable_mem_efficient", false);
    content.insert("chained_optim_avoid_prefix", true);
    common.insert("content_metadata", content);
    let mut optimizer = common.get(OPTIMIZER).and_then(Value::as_dict).cloned().unwrap_or_default();
    // Groups of one optimizer have the same settings: the first one stands for all.
    let mut of_chain: BTreeMap<Option<u64>, &Vec<(String, Value)>> = BTreeMap::new();
    for (group, values) in objects {
        of_chain.entry(group.chained).or_insert(values);
    }
    for (chained, values) in of_chain {
        let part = match chained.and_then(|at| i64::try_from(at).ok()) {
            Some(at) => optimizer.get_value(&Value::Int(at)).and_then(Value::as_dict).cloned(),
            None => Some(optimizer.clone()),
        };
        let mut part = part.unwrap_or_default();
        for (name, value) in values {
            part.insert(name.clone(), value.clone());
        }
        match chained.and_then(|at| i64::try_from(at).ok()) {
            Some(at) => {
                optimizer.insert(at, part);
            }
            None => optimizer = part,
        }
    }
    each(&mut optimizer, &mut |part| {
        part.remove("param_state");
        part.insert("param_state_sharding_type", format);
        step_into_groups(part);
    });
    common.insert(OPTIMIZER, optimizer);
    common
}

/// The common state with every step of the optimizer set to zero, as moments of zero need it.
pub(super) fn without_steps(common: &Dict) -> Dict {
    let mut common = common.clone();
    if let Some(Value::Dict(optimizer)) = common.get_mut(OPTIMIZER) {
        each(optimizer, &mut |part| {
            if let Some(Value::Dict(inner)) = part.get_mut(OPTIMIZER) {
                if let Some(Value::Dict(state)) = inner.get_mut("state") {
                    reset(state, "common_step");
                }
                for_groups(inner, |group| reset(group, "step"));
            }
            if let Some(Value::Dict(states)) = part.get_mut("param_state") {
                for (_, state) in states.iter_mut() {
                    if let Value::Dict(state) = state {
                        reset(state, "step");
                    }
                }
            }
        });
    }
    common
}

/// Calls `change` for the optimizer, or for each one of a chain.
fn each(optimizer: &mut Dict, change: &mut impl FnMut(&mut Dict)) {
    let chained = !optimizer.is_empty()
        && optimizer
            .iter()
            .all(|(key, value)| matches!((key, value), (Value::Int(_), Value::Dict(_))));
    if !chained {
        return change(optimizer);
    }
    for (_, part) in optimizer.iter_mut() {
        if let Value::Dict(part) = part {
            change(part);
        }
    }
}

fn for_groups(inner: &mut Dict, mut change: impl FnMut(&mut Dict)) {
    let Some(Value::List(groups)) = inner.get_mut(GROUPS) else { return };
    for group in groups {
        if let Value::Dict(group) = group {
            change(group);
        }
    }
}

/// The step that optimizers without a distributed state have in common, as one of every group.
fn step_into_groups(part: &mut Dict) {
    let Some(Value::Dict(inner)) = part.get_mut(OPTIMIZER) else { return };
    let Some(Value::Dict(state)) = inner.get("state") else { return };
    let Some(step) = state.get("common_step").and_then(number) else { return };
    if state.len() > 1 {
        return;
    }
    inner.remove("state");
    for_groups(inner, |group| {
        if group.get("step").is_none() {
            group.insert("step", step);
        }
    });
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Float(number) => Some(*number),
        #[allow(clippy::cast_precision_loss, reason = "no run has 2^53 steps")]
        Value::Int(number) => Some(*number as f64),
        Value::Tensor(tensor) => match dcp_convert::decode(tensor.dtype(), &tensor.to_vec()?)? {
            dcp_convert::Element::Float(number) => Some(number),
            #[allow(clippy::cast_precision_loss, reason = "no run has 2^53 steps")]
            dcp_convert::Element::Int(number) => Some(number as f64),
            _ => None,
        },
        _ => None,
    }
}

/// Sets a number to zero, whatever kind of number it is.
fn reset(dict: &mut Dict, key: &str) {
    let Some(value) = dict.get_mut(key) else { return };
    match value {
        Value::Int(number) => *number = 0,
        Value::Float(number) => *number = 0.0,
        Value::Tensor(tensor) => {
            if let Ok(zero) = Tensor::zeros(tensor.dtype(), tensor.shape().clone()) {
                *tensor = zero;
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;

    use super::*;

    fn groups(step: Option<f64>) -> Value {
        let mut group = Dict::from([("lr", 0.5)]);
        if let Some(step) = step {
            group.insert("step", step);
        }
        Value::List(vec![Value::Dict(group)])
    }

    fn step(common: &Dict, path: &[Value]) -> Option<f64> {
        let mut at = common.get(OPTIMIZER)?.as_dict()?;
        for key in path {
            at = at.get_value(key)?.as_dict()?;
        }
        let Value::List(groups) = at.get(OPTIMIZER)?.as_dict()?.get(GROUPS)? else { return None };
        groups.first()?.as_dict()?.get("step")?.as_float()
    }

    #[test]
    fn a_common_step_becomes_one_of_every_group() {
        let state = Dict::from([(
            "common_step",
            Value::Tensor(
                Tensor::replicated(DType::Float32, [], 7.0_f32.to_le_bytes().to_vec()).unwrap(),
            ),
        )]);
        let inner = Dict::from([("state", Value::Dict(state)), (GROUPS, groups(None))]);
        let common = Dict::from([(OPTIMIZER, Dict::from([(OPTIMIZER, inner)]))]);
        let made = fully_reshardable(&common, &GroupObjects::new());
        assert_eq!(step(&made, &[]), Some(7.0));
        // Common states before 0.13 do not say what is in the checkpoint.
        let content = made.get("content_metadata").unwrap().as_dict().unwrap();
        let named = content.get("distrib_optim_sharding_type").unwrap().as_str();
        assert_eq!(named, Some("fully_reshardable"));
        let optimizer = made.get(OPTIMIZER).unwrap().as_dict().unwrap();
        assert!(optimizer.get(OPTIMIZER).unwrap().as_dict().unwrap().get("state").is_none());
        let kind = optimizer.get("param_state_sharding_type").unwrap().as_str();
        assert_eq!(kind, Some("fully_reshardable"));
        assert_eq!(step(&without_steps(&made), &[]), Some(0.0));
    }

    #[test]
    fn objects_of_a_chain_go_where_their_optimizer_is() {
        let kind = || Dict::from([("param_state_sharding_type", "dp_reshardable")]);
        let chain: Dict = [(0_i64, kind()), (1, kind())].into_iter().collect();
        let content = Dict::from([("distrib_optim_sharding_type", "dp_reshardable")]);
        let common = Dict::from([(OPTIMIZER, chain), ("content_metadata", content)]);
        let object = |step| {
            let inner = Dict::from([(GROUPS, groups(Some(step)))]);
            vec![(OPTIMIZER.to_owned(), Value::Dict(inner))]
        };
        let key = |chained, group| GroupKey { chained: Some(chained), group };
        let objects =
            [(key(0, 0), object(1.0)), (key(1, 0), object(2.0)), (key(1, 1), object(9.0))];
        let made = fully_reshardable(&common, &objects.into_iter().collect());
        assert_eq!(step(&made, &[Value::Int(0)]), Some(1.0));
        assert_eq!(step(&made, &[Value::Int(1)]), Some(2.0));
        let content = made.get("content_metadata").unwrap().as_dict().unwrap();
        let named = content.get("distrib_optim_sharding_type").unwrap().as_str();
        assert_eq!(named, Some("fully_reshardable"));
        let prefix = content.get("chained_optim_avoid_prefix");
        assert!(matches!(prefix, Some(Value::Bool(true))), "{prefix:?}");
        let reset = without_steps(&made);
        assert_eq!(step(&reset, &[Value::Int(1)]), Some(0.0));
    }
}
