//! Assigns the keys of a training state to the optimizer and the model.

use std::borrow::Cow;
use std::collections::BTreeSet;

use dcp_core::CheckpointMetadata;
use dcp_core::metadata::Entry;
use dcp_core::path::{PathItem, StatePath};

/// The names of an optimizer at the root of a state dict, in torchtitan, OLMo-core, Lightning,
/// Accelerate, PyTorch's tutorials and JAX programs.
const OPTIMIZER_ROOTS: &[&str] = &[
    "optim",
    "optimizer",
    "optimizers",
    "optimizer_state",
    "optimizer_states",
    "optimizer_state_dict",
    "optim_state",
    "optim_state_dict",
    "opt_state",
    "opt_states",
    "opt_state_dict",
];
/// The names of a model in a state dict.
const MODEL_ROOTS: &[&str] = &["model", "model_state_dict", "state_dict", "module"];
/// Further names of a model, valid only next to an optimizer: a model may have parameters of such a
/// name.
const MODEL_ROOTS_BESIDE: &[&str] = &["params"];
/// The dict of per-parameter state in an optimizer's state dict.
const STATE: &str = "state";
const PARAM_GROUPS: &str = "param_groups";
/// The names of per-parameter tensors of PyTorch's optimizers that no layer has.
const MOMENTS: &[&str] = &[
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "acc_delta",
    "grad_avg",
];
/// The depth below the root to which an optimizer or a model is searched.
const DEPTH_MAX: usize = 4;

/// The parts of a training state.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// The prefix of the model, such as `model` or `app.model`.
    pub(crate) model: Option<String>,
    /// The prefixes of optimizers, such as `optim`, `app.optim` or `state`.
    optimizers: BTreeSet<String>,
    /// Whether values are in nested dicts.
    nested: bool,
    has_tensors: bool,
}

/// The path to a value; `None` for a flat name, of which several steps may be one dict key.
fn nested(entry: &Entry) -> Option<&StatePath> {
    entry.path().filter(|path| path.len() > 1)
}

/// The steps to a value, from its path or its name.
fn steps<'a>(fqn: &'a str, entry: &'a Entry) -> Vec<Cow<'a, str>> {
    match nested(entry) {
        Some(path) => path
            .iter()
            .map(|step| match step {
                PathItem::Key(key) => Cow::Borrowed(&**key),
                PathItem::Index(index) => Cow::Owned(index.to_string()),
            })
            .collect(),
        None => fqn.split('.').map(Cow::Borrowed).collect(),
    }
}

impl Parts {
    pub(crate) fn of(metadata: &CheckpointMetadata) -> Self {
        let mut parts = Self::default();
        for (fqn, entry) in metadata.iter() {
            let steps = steps(fqn, entry);
            parts.nested |= nested(entry).is_some();
            parts.has_tensors |= entry.as_tensor().is_some();
            if let Some(len) = named(&steps, nested(entry).is_some()) {
                parts.optimizers.insert(steps[..len].join("."));
            }
        }
        let (mut groups, mut with_model) = (BTreeSet::new(), BTreeSet::from([String::new()]));
        for (fqn, entry) in metadata.iter() {
            let steps = steps(fqn, entry);
            groups.extend(group_owner(&steps));
            let model = steps.iter().take(DEPTH_MAX).position(|s| MODEL_ROOTS.contains(&&**s));
            with_model.extend(model.map(|at| steps[..at].join(".")));
        }
        // A dict of parameter groups and states is an optimizer; a model next to them is not.
        for owner in groups {
            let below = |name: &str| match &*owner {
                "" => name.to_owned(),
                owner => format!("{owner}.{name}"),
            };
            if with_model.contains(&owner) {
                parts.optimizers.extend([below(STATE), below(PARAM_GROUPS)]);
            } else {
                parts.optimizers.insert(owner);
            }
        }
        for (fqn, entry) in metadata.iter() {
            if let Some(state) = state_of_moments(&steps(fqn, entry)) {
                parts.optimizers.insert(state);
            }
        }
        parts.model = parts.model_root(metadata);
        parts
    }

    /// Whether a key belongs to an optimizer.
    pub(crate) fn is_optimizer(&self, fqn: &str) -> bool {
        let dots = fqn.match_indices('.').map(|(at, _)| at);
        is_chained_optimizer(fqn)
            || dots.chain([fqn.len()]).any(|end| self.optimizers.contains(&fqn[..end]))
    }

    /// Whether a selected key looks like part of an optimizer that was not recognized.
    pub(crate) fn suspicious(fqn: &str, entry: &Entry) -> bool {
        let steps = steps(fqn, entry);
        let last = steps.last().is_some_and(|last| MOMENTS.contains(&&**last));
        let first = steps.first().map_or("", |first| &**first);
        // A whole optimizer, in a checkpoint that does not flatten dicts. `opt` alone may be the
        // options of a run.
        let object = entry.as_tensor().is_none() && steps.len() == 1;
        last || object && (first.contains("optim") || first.starts_with("opt_"))
    }

    /// Whether the state has several parts that names do not distinguish.
    pub(crate) fn are_unknown(&self) -> bool {
        self.model.is_none() && self.optimizers.is_empty() && (self.nested || !self.has_tensors)
    }

    /// The prefix of the model. Tensor names alone do not prove one, because many models' own names
    /// begin with `model.`; a dict of dicts does, and so does an optimizer next to it.
    fn model_root(&self, metadata: &CheckpointMetadata) -> Option<String> {
        let beside = !self.optimizers.is_empty();
        (self.nested || beside).then_some(())?;
        let outer_dots =
            |name: &str| name.rmatch_indices('.').map(|(at, _)| at).collect::<Vec<_>>();
        let around: BTreeSet<&str> = self
            .optimizers
            .iter()
            .flat_map(|name| outer_dots(name).into_iter().map(|end| &name[..end]))
            .collect();
        let mut found: Option<(usize, usize, String)> = None;
        for (fqn, entry) in metadata.iter() {
            let steps = steps(fqn, entry);
            let flat = nested(entry).is_none();
            for (depth, step) in steps.iter().enumerate().take(DEPTH_MAX) {
                let name = steps[..=depth].join(".");
                if self.optimizers.contains(&name) || depth + 1 == steps.len() {
                    break;
                }
                // In flat names, a root below another one counts only with an optimizer next to it.
                if depth > 0 && flat && !around.contains(&*steps[..depth].join(".")) {
                    continue;
                }
                let known = MODEL_ROOTS.iter().position(|root| root == step);
                let known = known.or_else(|| {
                    let rare = MODEL_ROOTS_BESIDE.iter().position(|root| root == step)?;
                    beside.then_some(MODEL_ROOTS.len() + rare)
                });
                if let Some(rank) = known {
                    let better = found.as_ref().is_none_or(|best| (depth, rank) < (best.0, best.1));
                    if better {
                        found = Some((depth, rank, name));
                    }
                    break;
                }
            }
        }
        found.map(|(.., name)| name)
    }
}

/// The number of steps to an optimizer that is identified by name alone.
fn named(steps: &[Cow<'_, str>], has_path: bool) -> Option<usize> {
    for (depth, step) in steps.iter().enumerate().take(DEPTH_MAX) {
        if MODEL_ROOTS.contains(&&**step) {
            return None;
        }
        if !OPTIMIZER_ROOTS.contains(&&**step) {
            continue;
        }
        // Below the root, a name alone may be that of a layer.
        let next = steps.get(depth + 1).map(|next| &**next);
        if depth == 0
            || matches!(next, Some(STATE | PARAM_GROUPS))
            || has_path && step.contains('_')
        {
            return Some(depth + 1);
        }
    }
    None
}

/// The dict that contains `param_groups`; `""` is the root.
fn group_owner(steps: &[Cow<'_, str>]) -> Option<String> {
    let at = steps.iter().take(DEPTH_MAX).position(|step| step == PARAM_GROUPS)?;
    outside_of_models(&steps[..at]).then(|| steps[..at].join("."))
}

fn outside_of_models(steps: &[Cow<'_, str>]) -> bool {
    !steps.iter().any(|step| MODEL_ROOTS.contains(&&**step))
}

/// The `state` dict that contains a moment of an optimizer without `param_groups`.
fn state_of_moments(steps: &[Cow<'_, str>]) -> Option<String> {
    let is_moment = steps.last().is_some_and(|last| MOMENTS.contains(&&**last));
    let at = steps.iter().take(DEPTH_MAX).position(|step| step == STATE)?;
    let inside = is_moment && at + 1 < steps.len();
    (inside && outside_of_models(&steps[..at])).then(|| steps[..=at].join("."))
}

/// Whether a key belongs to one of several Megatron-Core optimizers: `chained_<n>.optimizer.…`.
fn is_chained_optimizer(fqn: &str) -> bool {
    let chained = fqn.strip_prefix("chained_").and_then(|rest| rest.split_once('.'));
    chained.is_some_and(|(number, rest)| {
        number.bytes().all(|byte| byte.is_ascii_digit()) && rest.starts_with("optimizer.")
    })
}

/// The part of a name after the prefix `root`.
pub(crate) fn below<'a>(root: &str, fqn: &'a str) -> Option<&'a str> {
    fqn.strip_prefix(root)?.strip_prefix('.').filter(|rest| !rest.is_empty())
}

#[cfg(test)]
mod tests {
    use dcp_core::DType;
    use dcp_core::metadata::{ObjectEntry, TensorEntry};

    use super::*;

    #[test]
    fn chained_optimizers_are_told_by_name() {
        assert!(is_chained_optimizer("chained_12.optimizer.distributed.x"));
        for other in ["chained_x.optimizer.y", "chained_0.weight", "chain.optimizer.x"] {
            assert!(!is_chained_optimizer(other), "{other}");
        }
    }

    fn tensor(path: Option<StatePath>) -> Entry {
        let mut tensor = TensorEntry::new(DType::Float32, [2]);
        tensor.path = path;
        Entry::Tensor(tensor)
    }

    /// Of names with `/` between steps; those without one have no path.
    fn state(keys: &[&str]) -> CheckpointMetadata {
        let mut metadata = CheckpointMetadata::new();
        for key in keys {
            let path = key.contains('/').then(|| {
                key.trim_matches('/').split('/').map(|step| PathItem::Key(step.into())).collect()
            });
            metadata.insert(key.trim_matches('/').replace('/', "."), tensor(path));
        }
        metadata
    }

    /// The root of the model, and the keys that are no part of an optimizer.
    fn parts(keys: &[&str]) -> (Option<String>, Vec<String>) {
        let metadata = state(keys);
        let parts = Parts::of(&metadata);
        let kept = metadata.iter().filter(|(fqn, _)| !parts.is_optimizer(fqn));
        let kept = kept.map(|(fqn, _)| fqn.to_string()).collect();
        (parts.model, kept)
    }

    #[test]
    fn optimizers_are_found_below_a_root() {
        let tutorial = [
            "app/model/net1.weight",
            "app/optim/state/net1.weight/exp_avg",
            "app/optim/state/net1.weight/step",
            "app/optim/param_groups/0/lr",
            "step/",
        ];
        let kept = vec!["app.model.net1.weight".to_owned(), "step".to_owned()];
        assert_eq!(parts(&tutorial), (Some("app.model".to_owned()), kept.clone()));
        // As names of one dict, with and without a path.
        for end in ["", "/"] {
            let flat = tutorial.map(|key| key.trim_matches('/').replace('/', ".") + end);
            let flat: Vec<&str> = flat.iter().map(String::as_str).collect();
            assert_eq!(parts(&flat), (Some("app.model".to_owned()), kept.clone()));
        }
    }

    #[test]
    fn optimizers_of_any_name_are_told_by_their_groups() {
        let gan =
            ["g/w", "d/w", "opt_g/state/0/exp_avg", "opt_g/param_groups/0/lr", "x/param_groups/0"];
        assert_eq!(parts(&gan), (None, vec!["g.w".to_owned(), "d.w".to_owned()]));
        let root = ["w/", "state/w/exp_avg", "state/w/step", "param_groups/0/lr"];
        assert_eq!(parts(&root), (None, vec!["w".to_owned()]));
        let beside = ["app/model/w", "app/state/w/exp_avg", "app/param_groups/0/lr"];
        assert_eq!(parts(&beside), (Some("app.model".into()), vec!["app.model.w".to_owned()]));
        let no_groups = ["w/", "state/w/exp_avg", "state/w/step"];
        assert_eq!(parts(&no_groups), (None, vec!["w".to_owned()]));
        let jax = ["params/dense/kernel", "opt_state/0/mu/dense/kernel"];
        assert_eq!(parts(&jax), (Some("params".into()), vec!["params.dense.kernel".to_owned()]));
    }

    #[test]
    fn layers_of_such_names_are_no_optimizers() {
        for name in [
            "opt_proj.weight",
            "opt_model.decoder.w",
            "cell.state.weight",
            "net.optimizer.weight",
            "params.w",
        ] {
            assert_eq!(parts(&[name]), (None, vec![name.to_owned()]), "{name}");
        }
        let learned = ["model/optim.state.w", "model/optimizer/weight", "optim/state/w/step"];
        let (model, kept) = parts(&learned);
        assert_eq!((model.as_deref(), kept.len()), (Some("model"), 2));
        // A model that a model is in keeps its own names.
        assert_eq!(parts(&["model/model/w", "step/"]).0.as_deref(), Some("model"));
    }

    #[test]
    fn what_is_not_recognized_is_said() {
        let unknown = |keys: &[&str]| Parts::of(&state(keys)).are_unknown();
        assert!(unknown(&["net/w", "adam/w/m"]));
        assert!(
            !unknown(&["w/", "b/"]) && !unknown(&["layer.w"]) && !unknown(&["model/w", "adam/w/m"])
        );
        assert!(Parts::suspicious("adam.w.exp_avg", &tensor(None)));
        assert!(!Parts::suspicious("opt_proj", &tensor(None)));
        let object = Entry::Object(ObjectEntry::new(None));
        assert!(Parts::suspicious("opt_g", &object) && !Parts::suspicious("opt", &object));
    }
}
