//! Parameter groups and steps, in the form that `fully_reshardable` has.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use dcp_core::value::Dict;
use dcp_core::{Tensor, Value};

use super::format::OptimizerFormat;
use super::join::{SettingsDifference, join};
use super::keys::GroupKey;

const OPTIMIZER: &str = "optimizer";
const GROUPS: &str = "param_groups";

/// The names and values of the objects beside the buffers, by group.
pub(super) type GroupObjects = BTreeMap<GroupKey, Vec<(String, Value)>>;

/// The common state of a checkpoint whose optimizer becomes `fully_reshardable`, and where groups
/// of one optimizer say different things, of which there is room for one.
pub(super) fn fully_reshardable(
    common: &Dict,
    objects: &GroupObjects,
) -> (Dict, Vec<SettingsDifference>) {
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
    let mut differences = Vec::new();
    let mut of_chain: BTreeMap<Option<u64>, (&GroupKey, Dict)> = BTreeMap::new();
    for (group, values) in objects {
        let values: Dict = values.iter().map(|(name, value)| (&**name, value.clone())).collect();
        match of_chain.entry(group.chained) {
            Entry::Vacant(slot) => {
                slot.insert((group, values));
            }
            Entry::Occupied(mut slot) => {
                let (first, all) = slot.get_mut();
                differences.extend(join((first, all), (group, &values)));
            }
        }
    }
    for (chained, (_, values)) in of_chain {
        let part = match chained.and_then(|at| i64::try_from(at).ok()) {
            Some(at) => optimizer.get_value(&Value::Int(at)).and_then(Value::as_dict).cloned(),
            None => Some(optimizer.clone()),
        };
        let mut part = part.unwrap_or_default();
        for (name, value) in values {
            part.insert(name, value);
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
    (common, differences)
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
        Value::Tensor(tensor) => {
            match dcp_jobs::element::decode(tensor.dtype(), &tensor.to_vec()?)? {
                dcp_jobs::element::Element::Float(number) => Some(number),
                #[allow(clippy::cast_precision_loss, reason = "no run has 2^53 steps")]
                dcp_jobs::element::Element::Int(number) => Some(number as f64),
                _ => None,
            }
        }
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
        let (made, _) = fully_reshardable(&common, &GroupObjects::new());
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
        let (made, differences) = fully_reshardable(&common, &objects.into_iter().collect());
        let said: Vec<_> = differences.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            ["chained_1.optimizer.distributed.dp_group_idx_1 has other values than \
              chained_1.optimizer.distributed.dp_group_idx_0, whose are taken, at \
              optimizer.param_groups.0.step"]
        );
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

    #[test]
    fn what_only_some_ranks_of_the_model_have_is_kept() {
        let group = |decoupled: bool, lr: f64, more: &[(&str, i64)]| {
            let mut group = Dict::from([("pre_wd_mult", Value::Float(1.0)), ("lr", lr.into())]);
            group.insert("is_decoupled_lr", decoupled);
            for (key, value) in more {
                group.insert(*key, *value);
            }
            Value::Dict(group)
        };
        let objects = |groups: Vec<Value>, scale: Option<f64>| {
            let inner = Dict::from([(GROUPS, Value::List(groups))]);
            let mut all = vec![(OPTIMIZER.to_owned(), Value::Dict(inner))];
            let scaler = |scale| Value::Dict(Dict::from([("scale", Value::Float(scale))]));
            all.extend(scale.map(|scale| ("grad_scaler".to_owned(), scaler(scale))));
            all
        };
        let key = |group| GroupKey { chained: None, group };
        // The step of a group without parameters is not counted by every optimizer.
        let all = [
            (key(0), objects(vec![group(false, 0.1, &[("params", 5)])], None)),
            (key(1), objects(vec![group(true, 0.3, &[]), group(false, 0.1, &[("step", 7)])], None)),
            (key(2), objects(vec![group(false, 0.2, &[("params", 1)])], Some(8.0))),
            (key(3), objects(vec![group(true, 0.3, &[])], Some(9.0))),
        ];
        let (made, differences) = fully_reshardable(&Dict::new(), &all.into_iter().collect());
        let optimizer = made.get(OPTIMIZER).unwrap().as_dict().unwrap();
        let Value::List(groups) =
            optimizer.get(OPTIMIZER).unwrap().as_dict().unwrap().get(GROUPS).unwrap()
        else {
            panic!()
        };
        let expected = [group(false, 0.1, &[("params", 5), ("step", 7)]), group(true, 0.3, &[])];
        assert!(Value::List(groups.clone()).same(&Value::List(expected.into())), "{groups:?}");
        let scale = optimizer.get("grad_scaler").unwrap().as_dict().unwrap().get("scale");
        assert_eq!(scale.unwrap().as_float(), Some(8.0));
        let paths: Vec<_> =
            differences.iter().map(|one| (&*one.group, one.paths.join(" "))).collect();
        let name = |group| format!("optimizer.distributed.dp_group_idx_{group}");
        assert_eq!(
            paths,
            [
                (&*name(2), "optimizer.param_groups.0.lr".to_owned()),
                (&*name(3), "grad_scaler.scale".to_owned()),
            ]
        );
    }
}
