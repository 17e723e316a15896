//! The model states of a rank: names, shapes and order of all parameters, and the tensors that are stored whole.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Dims, Value};
use indexmap::IndexMap;

use crate::error::bad_file;
use crate::rank_file::{RankFile, as_strs};

/// Parameters by name, in the order of the flat buffer.
pub(crate) type Shapes = IndexMap<Arc<str>, Dims>;

/// Keys of the file that say how the parameters are stored, and are no state of the trainer.
const LAYOUT: [&str; 14] = [
    "module",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "buffer_names",
    "sparse_tensor_module_names",
    "checkpoint_parallel_dimensions",
    "dp_world_size",
    "mp_world_size",
    "num_experts",
    "ds_autoep_layers",
    "universal_checkpoint_info",
];

/// The file of one rank.
#[derive(Debug)]
pub(crate) struct ModelStates {
    /// Its position among the files that were opened.
    pub(crate) part: usize,
    pub(crate) name: String,
    /// The tensors of `module`, by name; `None` where there is no `module`, as in pipelines.
    pub(crate) module: Option<IndexMap<Arc<str>, usize>>,
    /// By group, or sub group of stage 3; `None` without ZeRO.
    pub(crate) groups: Option<Vec<Shapes>>,
    pub(crate) frozen: Shapes,
    /// The fragments of frozen parameters in this file.
    pub(crate) fragments: HashMap<Arc<str>, usize>,
    /// The name under which a name is stored.
    pub(crate) shared: IndexMap<Arc<str>, Arc<str>>,
    pub(crate) buffers: HashSet<Arc<str>>,
    /// Whether an optimizer is in this file.
    pub(crate) has_optimizer: bool,
    pub(crate) global_steps: Option<i64>,
    pub(crate) skipped_steps: Option<i64>,
    pub(crate) version: Option<String>,
    pub(crate) experts: Option<Vec<u64>>,
    pub(crate) config: Dict,
    pub(crate) stage: Option<u64>,
}

impl ModelStates {
    pub(crate) async fn read(part: usize, file: &RankFile) -> Result<Self, CheckpointError> {
        let mut module: Option<IndexMap<Arc<str>, usize>> = None;
        let (mut fragments, mut has_optimizer, mut is_ours) = (HashMap::new(), false, false);
        for (at, steps, entry) in file.entries() {
            match &*as_strs(&steps) {
                ["module", name] if entry.as_tensor().is_some() => {
                    module.get_or_insert_default().insert((*name).into(), at);
                }
                ["frozen_param_fragments", name] if entry.as_tensor().is_some() => {
                    fragments.insert(Arc::from(*name), at);
                }
                ["optimizer", _, ..] => has_optimizer = true,
                ["module" | "param_shapes", ..] => is_ours = true,
                _ => {}
            }
        }
        if !is_ours && module.is_none() {
            return Err(bad_file(
                &file.name,
                "it has no \"module\" and no \"param_shapes\": it is not DeepSpeed's",
            ));
        }
        let objects = file.objects(|steps| {
            let first = steps.first().map(|step| &**step);
            matches!(
                first,
                Some("param_shapes" | "frozen_param_shapes" | "shared_params" | "buffer_names")
                    | Some(
                        "global_steps"
                            | "skipped_steps"
                            | "ds_version"
                            | "num_experts"
                            | "ds_config"
                    )
            )
        });
        let mut states = Self {
            part,
            name: file.name.clone(),
            module,
            groups: None,
            frozen: Shapes::new(),
            fragments,
            shared: IndexMap::new(),
            buffers: HashSet::new(),
            has_optimizer,
            global_steps: None,
            skipped_steps: None,
            version: None,
            experts: None,
            config: Dict::new(),
            stage: None,
        };
        let mut groups: BTreeMap<u64, Shapes> = BTreeMap::new();
        let mut has_groups = false;
        for (steps, value) in objects.await? {
            let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
            let shape = |name: &str| {
                let problem = format!("the shape of {name:?} is none");
                shape_of(&value).ok_or_else(|| bad_file(&file.name, problem))
            };
            match &*steps {
                ["param_shapes"] => has_groups = !matches!(value.view(), Value::None),
                ["param_shapes", group, rest @ ..] => {
                    has_groups = true;
                    let bad =
                        || bad_file(&file.name, format!("param_shapes has a group {group:?}"));
                    let shapes = groups.entry(group.parse().map_err(|_| bad())?).or_default();
                    if let [name] = rest {
                        shapes.insert((*name).into(), shape(name)?);
                    }
                }
                ["frozen_param_shapes", name] => {
                    states.frozen.insert((*name).into(), shape(name)?);
                }
                ["shared_params", alias] => {
                    if let Some(stored) = value.as_str() {
                        states.shared.insert((*alias).into(), stored.into());
                    }
                }
                ["buffer_names"] => {
                    let names = value.as_list().unwrap_or_default().iter();
                    states.buffers = names.filter_map(|n| Some(Arc::from(n.as_str()?))).collect();
                }
                ["global_steps"] => states.global_steps = value.as_int(),
                ["skipped_steps"] => states.skipped_steps = value.as_int(),
                ["ds_version"] => states.version = value.as_str().map(ToOwned::to_owned),
                ["num_experts"] => {
                    let numbers = value.as_list().map(<[Value]>::iter);
                    states.experts = numbers.map(|n| n.filter_map(Value::as_u64).collect());
                }
                ["ds_config", "zero_optimization", "stage"] => states.stage = value.as_u64(),
                ["ds_config", key] => {
                    states.config.insert(*key, value.clone());
                }
                _ => {}
            }
        }
        if has_groups {
            for (expected, group) in (0..).zip(groups.keys()) {
                if *group != expected {
                    let problem = format!("param_shapes has no group {expected}");
                    return Err(bad_file(&file.name, problem));
                }
            }
            states.groups = Some(groups.into_values().collect());
        }
        Ok(states)
    }

    /// All parameters with master weights.
    pub(crate) fn trained(&self) -> impl Iterator<Item = (&Arc<str>, &Dims)> {
        self.groups.iter().flatten().flatten()
    }

    /// Whether a key of the file is state of the trainer.
    pub(crate) fn is_trainer_state(key: &str) -> bool {
        !LAYOUT.contains(&key)
    }
}

/// The most axes of a parameter, as many as PyTorch's tensors have.
const AXES_MAX: usize = 64;

/// A `torch.Size`, or another sequence of numbers.
fn shape_of(value: &Value) -> Option<Dims> {
    match value.view() {
        Value::Tuple(sizes) | Value::List(sizes) if sizes.len() <= AXES_MAX => {
            sizes.iter().map(Value::as_u64).collect()
        }
        Value::Object(object) if object.class.is("torch", "Size") => match object.args.first() {
            Some(sizes) => shape_of(sizes),
            None => Some(Dims::zeros(0)),
        },
        _ => None,
    }
}
