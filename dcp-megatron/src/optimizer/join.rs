//! Joins the optimizer settings of several data-parallel groups.
//!
//! A flat format keeps an object with the parameter groups for each rank of the model; the formats
//! by parameter have one for all. Megatron matches parameter groups by their distinguishing settings, not
//! by their order, so a group that only some stages of a pipeline have is one more for all.

use std::fmt;

use dcp_core::Value;
use dcp_core::value::{Dict, python_str};

use super::keys::GroupKey;

/// The fields that identify a parameter group: 0.20's, of which earlier versions have some. NeMo
/// has them with the prefix `pre_`.
const IDENTIFIERS: [&str; 9] = [
    "wd_mult",
    "lr_mult",
    "is_expert_parallel",
    "is_decoupled_lr",
    "max_lr",
    "min_lr",
    "start_wd",
    "end_wd",
    "optimizer",
];

/// Numbers of parameters, which are another rank's own.
const PARAMS: &str = "params";

/// The most parameter groups that are distinguished: far more than any optimizer has.
const GROUPS_MAX: usize = 1 << 10;

/// Places that are listed of one group.
const LISTED: usize = 64;

/// The settings in which the optimizer of one group of data-parallel ranks differs from that of the
/// first, which is used for all where the state is stored by parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SettingsDifference {
    /// The group, as its objects are named.
    pub group: String,
    /// The group whose values are used.
    pub taken: String,
    /// The places of the different values: steps joined by dots.
    pub paths: Vec<String>,
}

impl fmt::Display for SettingsDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, taken, paths } = self;
        write!(f, "{group} has other values than {taken}, whose are taken, at {}", paths.join(", "))
    }
}

/// Adds what a further group has to the settings of the first, and says where they cannot both
/// be kept.
pub(super) fn join(
    (first, all): (&GroupKey, &mut Dict),
    (group, here): (&GroupKey, &Dict),
) -> Option<SettingsDifference> {
    let mut paths = Vec::new();
    join_dicts(all, here, &mut Vec::new(), &mut paths);
    let difference = SettingsDifference { group: group.prefix(), taken: first.prefix(), paths };
    (!difference.paths.is_empty()).then_some(difference)
}

fn join_dicts(all: &mut Dict, here: &Dict, path: &mut Vec<String>, differing: &mut Vec<String>) {
    for (key, value) in here.iter() {
        let name = python_str(key).unwrap_or_default();
        if name == PARAMS {
            continue;
        }
        path.push(name);
        match (all.get_value_mut(key), value) {
            (None, value) => {
                all.insert(key.clone(), value.clone());
            }
            (Some(Value::Dict(all)), Value::Dict(here)) => join_dicts(all, here, path, differing),
            (Some(Value::List(all)), Value::List(here)) if are_groups(all) && are_groups(here) => {
                join_groups(all, here, path, differing);
            }
            (Some(all), here) => {
                if !all.same(here) && differing.len() < LISTED {
                    differing.push(path.join("."));
                }
            }
        }
        path.pop();
    }
}

fn are_groups(list: &[Value]) -> bool {
    list.len() <= GROUPS_MAX && list.iter().all(|item| matches!(item, Value::Dict(_)))
}

fn join_groups(
    all: &mut Vec<Value>,
    here: &[Value],
    path: &mut Vec<String>,
    differing: &mut Vec<String>,
) {
    let mut met = vec![false; all.len()];
    for group in here.iter().filter_map(Value::as_dict) {
        let same = |one: &Value| one.as_dict().is_some_and(|one| is_same_group(one, group));
        let at = (0..met.len())
            .find(|at| met.get(*at) == Some(&false) && all.get(*at).is_some_and(same));
        match at.and_then(|at| Some((at, met.get_mut(at)?, all.get_mut(at)?))) {
            Some((at, met, Value::Dict(one))) => {
                *met = true;
                path.push(at.to_string());
                join_dicts(one, group, path, differing);
                path.pop();
            }
            _ => {
                let mut group = group.clone();
                group.remove(PARAMS);
                all.push(Value::Dict(group));
            }
        }
    }
}

fn is_same_group(a: &Dict, b: &Dict) -> bool {
    let of = |group: &Dict, key: &str| {
        let value = group.get(key).or_else(|| group.get(&format!("pre_{key}")));
        value.cloned().unwrap_or(Value::None)
    };
    IDENTIFIERS.iter().all(|key| of(a, key).same(&of(b, key)))
}
