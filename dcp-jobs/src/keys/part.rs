//! Assigns the keys of a training state to the optimizer and the model.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use dcp_core::metadata::Entry;
use dcp_core::path::{PathItem, StatePath};
use dcp_core::{CheckpointMetadata, DType};

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
/// The names at the root of a training state that no model has, of torchtitan, Lightning and
/// Accelerate.
const TRAINER_ROOTS: &[&str] = &[
    "train_state",
    "trainer_state",
    "training_state",
    "lr_scheduler",
    "lr_schedulers",
    "dataloader",
    "rng_state",
    "rng_states",
];
/// Further ones, valid only next to an optimizer or one of [`TRAINER_ROOTS`].
const TRAINER_ROOTS_BESIDE: &[&str] = &[
    "scheduler",
    "schedulers",
    "scaler",
    "grad_scaler",
    "loss_scaler",
    "sampler",
    "callbacks",
    "loops",
    "rng",
];
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

/// The parts of a training state.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    /// The dicts that may be the model, by their prefixes.
    models: BTreeMap<String, ModelRoot>,
    /// The prefixes of optimizers, such as `optim`, `app.optim` or `state`.
    optimizers: BTreeSet<String>,
    /// The first steps to what a trainer keeps next to a model without a prefix.
    trainer: BTreeSet<String>,
    /// Whether values are in nested dicts.
    nested: bool,
    has_tensors: bool,
}

/// A dict that may be the model.
#[derive(Debug)]
struct ModelRoot {
    depth: usize,
    /// Whether no optimizer is needed next to it to tell that it is one.
    certain: bool,
    has_tensors: bool,
    /// Whether it is a moving average of another model.
    averaged: bool,
    /// Whether an optimizer is next to it.
    trained: bool,
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
        let mut with_model = BTreeSet::from([String::new()]);
        for (fqn, entry) in metadata.iter() {
            let steps = steps(fqn, entry);
            parts.nested |= nested(entry).is_some();
            parts.has_tensors |= entry.as_tensor().is_some();
            let model = steps.iter().position(|step| MODEL_ROOTS.contains(&&**step));
            with_model.extend(model.map(|at| steps[..at].join(".")));
        }
        let mut groups = BTreeSet::new();
        for (fqn, entry) in metadata.iter() {
            let steps = steps(fqn, entry);
            if let Some(len) = named(&steps, nested(entry).is_some(), &with_model) {
                parts.optimizers.insert(steps[..len].join("."));
            }
            groups.extend(group_owner(&steps));
            parts.optimizers.extend(state_of_moments(&steps));
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
        parts.models = parts.model_roots(metadata);
        parts.trainer = parts.trainer_roots(metadata);
        parts
    }

    /// Whether a key belongs to an optimizer.
    pub(crate) fn is_optimizer(&self, fqn: &str) -> bool {
        let dots = fqn.match_indices('.').map(|(at, _)| at);
        is_chained_optimizer(fqn)
            || dots.chain([fqn.len()]).any(|end| self.optimizers.contains(&fqn[..end]))
    }

    /// Whether a key of a state without a [model root](Self::model) belongs to the model.
    pub(crate) fn is_model(&self, fqn: &str, entry: &Entry) -> bool {
        let first = steps(fqn, entry).first().is_some_and(|first| self.trainer.contains(&**first));
        !first && !self.is_optimizer(fqn)
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
        self.models.is_empty() && self.optimizers.is_empty() && (self.nested || !self.has_tensors)
    }

    /// The prefix of the model that has any of these keys. `None` when the keys of the model are at the
    /// root.
    ///
    /// # Errors
    ///
    /// The candidates, when there are several.
    pub(crate) fn model<'a>(
        &self,
        keys: impl Iterator<Item = &'a str>,
    ) -> Result<Option<&str>, Vec<&str>> {
        let mut left: BTreeMap<&str, &ModelRoot> = BTreeMap::new();
        if !self.models.is_empty() {
            let roots = keys.filter_map(|fqn| {
                outer(fqn).filter_map(|name| self.models.get_key_value(name)).last()
            });
            left.extend(roots.map(|(name, root)| (&**name, root)));
        }
        narrow(&mut left, |root| root.has_tensors);
        narrow(&mut left, |root| root.certain);
        narrow(&mut left, |root| !root.averaged);
        let top = left.values().map(|root| root.depth).min().unwrap_or(0);
        if left.values().any(|root| root.depth == top && root.trained) {
            left.retain(|_, root| root.depth == top && root.trained);
        } else {
            // An optimizer next to a model further below contradicts that the topmost one is trained.
            left.retain(|_, root| root.depth == top || root.trained);
        }
        let mut names = left.into_keys();
        match (names.next(), names.next()) {
            (first, None) => Ok(first),
            (first, second) => Err(first.into_iter().chain(second).chain(names).collect()),
        }
    }

    /// The dicts that may be the model. Tensor names alone do not prove one, because many models' own
    /// names begin with `model.`; a dict of dicts does, and so does an optimizer next to it.
    fn model_roots(&self, metadata: &CheckpointMetadata) -> BTreeMap<String, ModelRoot> {
        let beside = !self.optimizers.is_empty();
        let mut found: BTreeMap<String, ModelRoot> = BTreeMap::new();
        if !self.nested && !beside {
            return found;
        }
        let around: BTreeSet<&str> = self.optimizers.iter().flat_map(|name| outer(name)).collect();
        for (fqn, entry) in metadata.iter() {
            let steps = steps(fqn, entry);
            let flat = nested(entry).is_none();
            for (depth, step) in steps.iter().enumerate().take(steps.len().saturating_sub(1)) {
                let certain = MODEL_ROOTS.contains(&&**step);
                if !(certain || beside && MODEL_ROOTS_BESIDE.contains(&&**step)) {
                    continue;
                }
                let name = steps[..=depth].join(".");
                if self.is_optimizer(&name) {
                    break;
                }
                // In flat names, a root below another one counts only with an optimizer next to it.
                if depth > 0 && flat && !around.contains(&*steps[..depth].join(".")) {
                    continue;
                }
                let averaged = steps[..depth].iter().any(|step| is_average(step));
                let root = found.entry(name).or_insert(ModelRoot {
                    depth,
                    certain,
                    has_tensors: false,
                    averaged,
                    trained: false,
                });
                root.has_tensors |= entry.as_tensor().is_some();
                break;
            }
        }
        // The models in the innermost dict around an optimizer that has any.
        let parents: BTreeSet<String> = found.keys().map(|name| parent(name).to_owned()).collect();
        let trained = self.optimizers.iter();
        let trained =
            trained.filter_map(|name| outer(name).chain([""]).find(|dict| parents.contains(*dict)));
        let trained: BTreeSet<&str> = trained.collect();
        for (name, root) in &mut found {
            root.trained = trained.contains(parent(name));
        }
        found
    }

    /// The first steps to what a trainer keeps next to a model whose keys are at the root.
    fn trainer_roots(&self, metadata: &CheckpointMetadata) -> BTreeSet<String> {
        let (mut certain, mut beside) = (BTreeSet::new(), BTreeSet::new());
        for (fqn, entry) in metadata.iter() {
            let steps = steps(fqn, entry);
            let Some(first) = steps.first() else { continue };
            if TRAINER_ROOTS.contains(&&**first) {
                certain.insert(first.to_string());
            } else if TRAINER_ROOTS_BESIDE.contains(&&**first)
                || is_average(first)
                || steps.len() == 1 && is_counter(entry)
            {
                beside.insert(first.to_string());
            }
        }
        if !self.optimizers.is_empty() || !certain.is_empty() {
            certain.append(&mut beside);
        }
        // What an optimizer trains is the model, whatever its name.
        if !certain.is_empty() {
            for (fqn, _) in metadata.iter() {
                let dots = fqn.match_indices('.').map(|(at, _)| at);
                let Some(end) = dots.into_iter().find(|end| self.optimizers.contains(&fqn[..*end]))
                else {
                    continue;
                };
                let inner = &fqn[end + 1..];
                let inner = inner.strip_prefix("state.").unwrap_or(inner);
                certain.remove(inner.split('.').next().unwrap_or(inner));
            }
        }
        certain
    }
}

/// Leaves the candidates that `keep` accepts, if there are any.
fn narrow(left: &mut BTreeMap<&str, &ModelRoot>, keep: impl Fn(&ModelRoot) -> bool) {
    if left.values().any(|root| keep(root)) {
        left.retain(|_, root| keep(root));
    }
}

/// The names of the dicts around the value `name`, innermost first.
fn outer(name: &str) -> impl Iterator<Item = &str> {
    name.rmatch_indices('.').map(|(end, _)| &name[..end])
}

fn parent(name: &str) -> &str {
    outer(name).next().unwrap_or_default()
}

/// Whether a dict of this name has a moving average of the model's weights.
fn is_average(step: &str) -> bool {
    step == "ema" || step.starts_with("ema_") || step.ends_with("_ema")
}

/// The dtypes of counters.
const COUNTERS: &[DType] = &[DType::Int32, DType::Int64, DType::UInt64];

/// Whether a tensor is a single integer, such as the number of steps or of tokens.
fn is_counter(entry: &Entry) -> bool {
    entry
        .as_tensor()
        .is_some_and(|tensor| tensor.shape.is_empty() && COUNTERS.contains(&tensor.dtype))
}

/// The number of steps to an optimizer that is identified by name alone.
fn named(steps: &[Cow<'_, str>], has_path: bool, with_model: &BTreeSet<String>) -> Option<usize> {
    for (depth, step) in steps.iter().enumerate() {
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
            || has_path && (step.contains('_') || with_model.contains(&steps[..depth].join(".")))
        {
            return Some(depth + 1);
        }
    }
    None
}

/// The dict that contains `param_groups`; `""` is the root.
fn group_owner(steps: &[Cow<'_, str>]) -> Option<String> {
    let at = steps.iter().position(|step| step == PARAM_GROUPS)?;
    outside_of_models(&steps[..at]).then(|| steps[..at].join("."))
}

fn outside_of_models(steps: &[Cow<'_, str>]) -> bool {
    !steps.iter().any(|step| MODEL_ROOTS.contains(&&**step))
}

/// The `state` dict that contains a moment of an optimizer without `param_groups`. The innermost one,
/// because a trainer's own dict may have this name too.
fn state_of_moments(steps: &[Cow<'_, str>]) -> Option<String> {
    let (last, outer) = steps.split_last()?;
    if !MOMENTS.contains(&&**last) {
        return None;
    }
    let states = outer.iter().enumerate().rev().filter(|(_, step)| *step == STATE);
    let at = states.map(|(at, _)| at).find(|at| outside_of_models(&steps[..*at]))?;
    Some(steps[..=at].join("."))
}

/// Whether a key belongs to one of several Megatron-Core optimizers: `chained_<n>.optimizer.…`.
fn is_chained_optimizer(fqn: &str) -> bool {
    let chained = fqn.strip_prefix("chained_").and_then(|rest| rest.split_once('.'));
    chained.is_some_and(|(number, rest)| {
        number.bytes().all(|byte| byte.is_ascii_digit()) && rest.starts_with("optimizer.")
    })
}

/// Whether an entry may have weights of a model: tensors do, and so may an object that is called or is
/// in a dict that is called as a model is, such as a pickled module.
pub(crate) fn may_have_weights(fqn: &str, entry: &Entry) -> bool {
    let is_wrapped = entry.as_object().is_some_and(|object| object.tensor.is_some());
    let is_model = |step: &Cow<'_, str>| MODEL_ROOTS.contains(&&**step);
    entry.as_tensor().is_some() || is_wrapped || steps(fqn, entry).iter().any(is_model)
}

/// The part of a name after the prefix `root`.
pub(crate) fn below<'a>(root: &str, fqn: &'a str) -> Option<&'a str> {
    fqn.strip_prefix(root)?.strip_prefix('.').filter(|rest| !rest.is_empty())
}

#[cfg(test)]
mod tests {
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

    fn model<'a>(
        parts: &'a Parts,
        metadata: &CheckpointMetadata,
    ) -> Result<Option<&'a str>, Vec<&'a str>> {
        parts.model(metadata.iter().map(|(fqn, _)| &**fqn))
    }

    /// The root of the model, and the keys that are no part of an optimizer.
    fn parts(keys: &[&str]) -> (Option<String>, Vec<String>) {
        let metadata = state(keys);
        let parts = Parts::of(&metadata);
        let kept = metadata.iter().filter(|(fqn, _)| !parts.is_optimizer(fqn));
        let kept = kept.map(|(fqn, _)| fqn.to_string()).collect();
        (model(&parts, &metadata).unwrap().map(str::to_owned), kept)
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

    /// Layouts of trainers, each with the root of the model. The keys of a model without a root follow
    /// it.
    #[test]
    fn models_are_found_in_every_layout() {
        let table: &[(&str, &[&str], &str)] = &[
            (
                "Composer, LLM Foundry",
                &[
                    "state/model/model.w",
                    "state/optimizers/Adam/state/model.w/exp_avg",
                    "state/optimizers/Adam/param_groups",
                    "state/schedulers/x/last",
                    "rng/0",
                ],
                "state.model",
            ),
            (
                "Composer with an optimizer whose fields are not known",
                &["state/model/w", "state/optimizers/Lion/state/0/m", "rng/0"],
                "state.model",
            ),
            (
                "Composer, flat names",
                &["state.model.w", "state.optimizers.Adam.state.w.exp_avg"],
                "state.model",
            ),
            (
                "Lightning",
                &[
                    "state_dict/model.w",
                    "optimizer_states/0/state/0/exp_avg",
                    "optimizer_states/0/param_groups/0/lr",
                    "callbacks/EMA/model/w",
                    "hyper_parameters/model/width",
                    "loops/fit_loop/state_dict/x",
                ],
                "state_dict",
            ),
            (
                "torchtitan, flat",
                &[
                    "tok.weight/",
                    "layers.0.w/",
                    "optimizer/state.tok.weight.exp_avg",
                    "optimizer/param_groups.tok.weight.lr",
                    "train_state/step",
                    "train_state/ntokens_seen",
                    "lr_scheduler/last_epoch",
                    "dataloader/dp_rank_0",
                    "scaler/scale",
                    "ema/ema_params.tok.weight",
                ],
                " tok.weight layers.0.w",
            ),
            ("AppState", &["app/model/w", "app/optim/state/w/exp_avg"], "app.model"),
            (
                "AppState in a trainer",
                &["a/b/c/d/e/model/w", "a/b/c/d/e/optim/state/0/m"],
                "a.b.c.d.e.model",
            ),
            ("EMA", &["ema/model/w", "state/model/w", "state/optimizer/state/0/m"], "state.model"),
            ("EMA alone", &["ema/model/w", "step/"], "ema.model"),
            ("EMA at the root", &["model/w", "ema_model/w", "optim/state/0/m"], "model"),
            ("DeepSpeed", &["module/w", "optimizer/state/0/exp_avg", "ds_config/x"], "module"),
            (
                "a nested trainer",
                &["trainer/fit/model/w", "trainer/fit/optimizer_state/0/m", "trainer/epoch"],
                "trainer.fit.model",
            ),
            (
                "a student with a teacher",
                &["student/model/w", "student/optim/state/0/m", "teacher/model/w"],
                "student.model",
            ),
            ("an optimizer further below", &["model/w", "train/optim/state/0/m"], "model"),
            ("layers of such names", &["ema/w", "scaler/w", "optim/state.ema.w.exp_avg"], " ema.w"),
            ("a model alone", &["scaler.w", "ema.w"], " scaler.w ema.w"),
        ];
        for (layout, keys, expected) in table {
            let metadata = state(keys);
            let parts = Parts::of(&metadata);
            let mut found = model(&parts, &metadata).unwrap().unwrap_or_default().to_owned();
            if found.is_empty() {
                for (fqn, _) in metadata.iter().filter(|(fqn, entry)| parts.is_model(fqn, entry)) {
                    found.push(' ');
                    found.push_str(fqn);
                }
            }
            assert_eq!(found, *expected, "{layout}: {parts:?}");
            for (fqn, _) in metadata.iter() {
                let optimizer = ["/exp_avg", "/m", ".exp_avg", ".lr", "/lr", "param_groups"];
                let key = keys.iter().find(|key| key.trim_matches('/').replace('/', ".") == **fqn);
                let expected = optimizer.iter().any(|end| key.unwrap().ends_with(end));
                assert_eq!(parts.is_optimizer(fqn), expected, "{layout}: {fqn}");
            }
        }
    }

    #[test]
    fn several_models_are_listed_and_none_is_guessed() {
        let table: &[(&[&str], &[&str])] = &[
            (
                &["g/model/w", "g/optim/state/0/m", "d/model/w", "d/optim/state/0/m"],
                &["d.model", "g.model"],
            ),
            (&["a/model/w", "b/model/w"], &["a.model", "b.model"]),
            (&["model/w", "module/w", "optim/state/0/m"], &["model", "module"]),
            (&["model/w", "x/model/w", "x/optim/state/0/m"], &["model", "x.model"]),
        ];
        for (keys, expected) in table {
            let metadata = state(keys);
            let parts = Parts::of(&metadata);
            assert_eq!(model(&parts, &metadata).unwrap_err(), *expected);
            for root in *expected {
                let below =
                    metadata.iter().map(|(fqn, _)| &**fqn).filter(|fqn| fqn.starts_with(root));
                assert_eq!(parts.model(below), Ok(Some(*root)));
            }
        }
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
