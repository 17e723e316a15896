//! The optimizer's entries of one file.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_core::{CheckpointError, Value};
use indexmap::IndexMap;

use crate::error::bad_file;
use crate::flat::Segment;
use crate::rank_file::{RankFile, as_strs};

/// Names of values of one group.
pub(crate) type GroupStates = IndexMap<Arc<str>, usize>;

/// The optimizer's entries of one file.
#[derive(Debug, Default)]
pub(crate) struct RankOptimizer {
    pub(crate) part: usize,
    pub(crate) name: String,
    /// The master weights by group: of stage 3 by sub group.
    pub(crate) weights: BTreeMap<u64, usize>,
    pub(crate) states: BTreeMap<u64, GroupStates>,
    pub(crate) settings: Vec<(Vec<String>, usize)>,
    pub(crate) is_stage3: bool,
    /// The stage that the file names.
    pub(crate) stage: Option<u64>,
    pub(crate) loss_scaler: Option<usize>,
    /// The ranks of each group, or of all.
    pub(crate) partitions: Option<Vec<u64>>,
    pub(crate) paddings: BTreeMap<u64, Vec<u64>>,
    /// The groups of `param_groups`, by the sub groups of stage 3 that each has.
    pub(crate) group_members: BTreeMap<u64, Vec<u64>>,
    pub(crate) version: Option<String>,
}

impl RankOptimizer {
    pub(crate) async fn read(part: usize, file: &RankFile) -> Result<Self, CheckpointError> {
        const ROOT: &str = "optimizer_state_dict";
        const BASE: &str = "base_optimizer_state";
        let mut found = Self { part, name: file.name.clone(), ..Self::default() };
        for (at, steps, entry) in file.entries() {
            let steps = as_strs(&steps);
            let is_tensor = entry.as_tensor().is_some();
            match &*steps {
                [ROOT, "single_partition_of_fp32_groups", group] if is_tensor => {
                    found.weights.extend(group.parse().ok().map(|group| (group, at)));
                }
                [ROOT, "fp32_flat_groups", group] if is_tensor => {
                    found.is_stage3 = true;
                    found.weights.extend(group.parse().ok().map(|group| (group, at)));
                }
                [ROOT, BASE | ROOT, "param_groups", rest @ ..] => {
                    let rest = rest.iter().map(ToString::to_string).collect();
                    found.settings.push((rest, at));
                }
                [ROOT, BASE | ROOT, "state", group, key] | [ROOT, BASE, group, key] => {
                    if let Ok(group) = group.parse() {
                        found.states.entry(group).or_default().insert((*key).into(), at);
                    }
                }
                [ROOT, "loss_scaler"] => found.loss_scaler = Some(at),
                _ => {}
            }
        }
        let objects = file.objects(|steps| {
            let steps = as_strs(steps);
            matches!(
                &*steps,
                [ROOT, "partition_count" | "param_alignment_paddings" | "zero_stage", ..]
                    | ["ds_version"]
                    | [ROOT, BASE | ROOT, "param_groups", _, "params"]
            )
        });
        for (steps, value) in objects.await? {
            let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
            match &*steps {
                [ROOT, "partition_count"] => found.partitions = numbers(&value),
                [ROOT, "param_alignment_paddings"] => {
                    for (group, paddings) in (0..).zip(value.view().as_list().unwrap_or_default()) {
                        found.paddings.extend(numbers(paddings).map(|paddings| (group, paddings)));
                    }
                }
                [ROOT, "zero_stage"] => found.stage = member(&value),
                ["ds_version"] => found.version = value.as_str().map(ToOwned::to_owned),
                [_, _, _, group, _] => {
                    let members = group.parse().ok().zip(numbers(&value));
                    found.group_members.extend(members);
                }
                _ => {}
            }
        }
        if found.weights.is_empty() {
            let problem = "it has no master weights of ZeRO (single_partition_of_fp32_groups, fp32_flat_groups)";
            return Err(bad_file(&file.name, problem));
        }
        Ok(found)
    }

    /// The settings of the groups.
    pub(crate) fn settings(&self) -> Vec<(Vec<String>, usize, usize)> {
        let settings = self.settings.iter();
        settings.map(|(steps, at)| (steps.clone(), self.part, *at)).collect()
    }
}

/// A number, or a list of them.
fn numbers(value: &Value) -> Option<Vec<u64>> {
    match value.view() {
        Value::List(items) | Value::Tuple(items) => items.iter().map(Value::as_u64).collect(),
        other => Some(vec![other.as_u64()?]),
    }
}

/// The number of a member of an enumeration of Python.
fn member(value: &Value) -> Option<u64> {
    let view = value.view();
    view.as_object().and_then(|member| member.args.first()).unwrap_or(view).as_u64()
}

/// The tensor of one axis that an entry is.
pub(crate) fn segment(
    files: &[RankFile],
    rank: &RankOptimizer,
    entry: usize,
) -> Result<Segment, CheckpointError> {
    let tensor = files.get(rank.part).and_then(|file| file.tensor(entry));
    match tensor.map(|tensor| &*tensor.shape) {
        Some([len]) => Ok(Segment { part: rank.part, entry, len: *len }),
        _ => Err(bad_file(&rank.name, "a buffer of the optimizer is no tensor of one axis")),
    }
}
