//! State dicts as PyTorch's helpers make them, of a model and an AdamW that PyTorch trained.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use dcp::core::StorageReader;
use dcp::core::metadata::Entry;
use dcp::core::registry::Access;
use dcp::core::value::Dict;
use dcp::formats::dcp::DcpReader;
use dcp::planner::{FlattenRule, flatten, set_at_path};
use dcp::state::{
    HiddenModule, Model, ModelEntry, Optimizer, ParamGroup, ParamId, StateDictOptions,
    TrainingState, get_state_dict,
};
use dcp::{CheckpointError, Checkpointer, Collective, LoadMode, StateDict, Tensor, Value};
use serde_json::Value as Json;

use crate::{Result, layout, storage};

/// Compares the state dicts of PyTorch's model with those of ours, saves ours, and loads PyTorch's.
pub(crate) async fn run(folder: &str, group: &Arc<dyn Collective>) -> Result {
    let path = |name: &str| format!("{folder}/{name}");
    let raw = stored(&path("raw"), Some((group, &|_| true))).await?;
    let described: Json = serde_json::from_slice(&std::fs::read(path("model.json"))?)?;
    // `DistributedDataParallel(torch.compile(Net()))`.
    let hidden = vec![HiddenModule::data_parallel("")];
    let mut module = Module::new(&described, &raw, hidden)?;
    let mut adam = Adam::new(&described, &raw)?;
    for (name, is_flat) in [("nested", false), ("flat", true)] {
        let options = StateDictOptions::new().flatten_optimizer_state_dict(is_flat);
        let whole = options.clone().full_state_dict(true).group(Arc::clone(group));
        let theirs = stored(&path(name), None).await?;
        let ours = whole_state(&module, &mut adam, &whole).await?;
        compare(&ours, &theirs).map_err(|error| format!("{name}: {error}"))?;

        let checkpointer = Checkpointer::in_group(Arc::clone(group));
        let state = TrainingState::new(&mut module, vec![&mut adam])?.options(options.clone())?;
        checkpointer.save(&state, path(&format!("ours_{name}"))).await?;

        let (mut fresh, mut lazy) = (module.zeroed()?, adam.untrained()?);
        let state = TrainingState::new(&mut fresh, vec![&mut lazy])?;
        let mut state = state.options(options)?;
        checkpointer.load(&mut state, path(name)).mode(LoadMode::Exact).await?;
        let loaded = whole_state(&fresh, &mut lazy, &whole).await?;
        compare(&loaded, &theirs).map_err(|error| format!("{name}, loaded: {error}"))?;
    }
    Ok(())
}

/// The state dicts of both, as a checkpoint has them.
pub(crate) async fn whole_state(
    module: &Module,
    adam: &mut Adam,
    options: &StateDictOptions,
) -> Result<StateDict> {
    let (model, optimizer) = get_state_dict(module, &mut [adam], options).await?;
    Ok(StateDict::from([("model", model), ("optimizer", optimizer)]))
}

/// The ranks that load a checkpoint, and whether they shard a tensor of this number of chunks.
pub(crate) type Sharding<'a> = (&'a Arc<dyn Collective>, &'a (dyn Fn(usize) -> bool + Sync));

/// All of a checkpoint: whole, or with the shards of a rank.
pub(crate) async fn stored(checkpoint: &str, group: Option<Sharding<'_>>) -> Result<StateDict> {
    if !Path::new(checkpoint).exists() {
        return Err(format!("there is no {checkpoint}").into());
    }
    let reader = DcpReader::new(storage(checkpoint, Access::Read).await?);
    let mut state = StateDict::new();
    for (_, entry) in reader.metadata().await?.iter() {
        let value = match (entry, group) {
            (Entry::Tensor(tensor), Some((group, is_sharded)))
                if !tensor.shape.is_empty() && is_sharded(tensor.chunks.len()) =>
            {
                let (rank, world) = (group.rank(), group.world_size());
                let regions = layout::by_name("shard0", &tensor.shape, rank, world)?;
                let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                Tensor::zeros_sharded(dtype, shape, regions.unwrap_or_default())?.into()
            }
            (Entry::Tensor(tensor), _) => Tensor::zeros(tensor.dtype, tensor.shape.clone())?.into(),
            _ => Value::None,
        };
        set_at_path(&mut state, entry.path().ok_or("an entry without a path")?, value)?;
    }
    let checkpointer = match group {
        Some((group, _)) => Checkpointer::in_group(Arc::clone(group)),
        None => Checkpointer::new(),
    };
    checkpointer.load(&mut state, checkpoint).mode(LoadMode::Exact).await?;
    Ok(state)
}

/// Fails unless both have the same keys and values.
pub(crate) fn compare(ours: &StateDict, theirs: &StateDict) -> Result {
    let leaves = |state| -> Result<BTreeMap<_, _>> {
        let leaves = flatten(state, FlattenRule::Torch24)?.into_iter();
        Ok(leaves.map(|leaf| ((leaf.fqn, leaf.path), leaf.value.clone())).collect())
    };
    let (ours, theirs) = (leaves(ours)?, leaves(theirs)?);
    if !ours.keys().eq(theirs.keys()) {
        return Err(format!("keys {:?} instead of {:?}", ours.keys(), theirs.keys()).into());
    }
    for (key, value) in &theirs {
        let own = ours.get(key);
        if !own.is_some_and(|own| own.same(value)) {
            return Err(format!("{}: {own:?} instead of {value:?}", key.0).into());
        }
    }
    Ok(())
}

fn dict<'a>(state: &'a StateDict, key: &str) -> Result<&'a Dict> {
    Ok(state.get(key).and_then(Value::as_dict).ok_or_else(|| format!("no {key}"))?)
}

fn list<'a>(json: &'a Json, key: &str) -> Result<&'a [Json]> {
    let list = json.get(key).and_then(Json::as_array).ok_or_else(|| format!("no {key}"))?;
    Ok(list)
}

fn zeros_like(tensor: &Tensor) -> Result<Tensor> {
    let (dtype, shape) = (tensor.dtype(), tensor.shape().clone());
    Ok(if tensor.is_sharded() {
        let regions = tensor.shards().iter().map(|shard| shard.region().clone());
        Tensor::zeros_sharded(dtype, shape, regions)?
    } else {
        Tensor::zeros(dtype, shape)?
    })
}

fn entries(described: &Json, raw: &StateDict) -> Result<Vec<ModelEntry>> {
    let values = dict(raw, "model")?;
    let entry = |entry: &Json| -> Result<ModelEntry> {
        let name = entry.get("name").and_then(Json::as_str).ok_or("an entry without a name")?;
        let value = values.get(name).ok_or_else(|| format!("no {name}"))?;
        let frozen = entry.get("frozen").and_then(Json::as_bool).unwrap_or_default();
        Ok(match (value, entry.get("id").and_then(Json::as_u64)) {
            (Value::Tensor(tensor), Some(id)) => {
                ModelEntry::parameter(name, ParamId(id), tensor.clone()).with_frozen(frozen)
            }
            (Value::Tensor(tensor), None) => ModelEntry::buffer(name, tensor.clone()),
            (other, _) => ModelEntry::extra_state(name, other.clone()),
        })
    };
    list(described, "entries")?.iter().map(entry).collect()
}

/// The model that the script describes.
pub(crate) struct Module {
    entries: Vec<ModelEntry>,
    hidden: Vec<HiddenModule>,
}

impl Module {
    pub(crate) fn new(
        described: &Json,
        raw: &StateDict,
        hidden: Vec<HiddenModule>,
    ) -> Result<Self> {
        Ok(Self { entries: entries(described, raw)?, hidden })
    }

    pub(crate) fn zeroed(&self) -> Result<Self> {
        let mut entries = self.entries.clone();
        for entry in &mut entries {
            if let Value::Tensor(tensor) = &entry.value {
                entry.value = zeros_like(tensor)?.into();
            }
        }
        Ok(Self { entries, hidden: self.hidden.clone() })
    }
}

impl Model for Module {
    fn entries(&self) -> std::result::Result<Vec<ModelEntry>, CheckpointError> {
        Ok(self.entries.clone())
    }

    fn hidden_modules(&self) -> Vec<HiddenModule> {
        self.hidden.clone()
    }

    fn load(&mut self, loaded: Vec<(String, Value)>) -> std::result::Result<(), CheckpointError> {
        for (name, value) in loaded {
            if let Some(entry) = self.entries.iter_mut().find(|entry| entry.name == name) {
                entry.value = value;
            }
        }
        Ok(())
    }
}

#[derive(Clone)]
pub(crate) struct Adam {
    groups: Vec<ParamGroup>,
    state: BTreeMap<ParamId, Dict>,
    /// The states that a first step creates.
    initial: BTreeMap<ParamId, Dict>,
}

impl Adam {
    pub(crate) fn new(described: &Json, raw: &StateDict) -> Result<Self> {
        let raw = dict(raw, "optimizer")?;
        let Some(Value::List(options)) = raw.get("param_groups") else {
            return Err("no list of groups".into());
        };
        let mut groups = Vec::new();
        for (group, options) in list(described, "groups")?.iter().zip(options) {
            let ids = group.as_array().ok_or("a group without parameters")?.iter();
            let mut group = ParamGroup::new(ids.filter_map(Json::as_u64).map(ParamId));
            group.options = options.as_dict().ok_or("a group without options")?.clone();
            group.options.remove("params");
            groups.push(group);
        }
        let mut state = BTreeMap::new();
        for (id, of_param) in dict(raw, "state")?.iter() {
            let id =
                id.as_str().and_then(|id| id.parse().ok()).ok_or("a state without a number")?;
            let of_param = of_param.as_dict().ok_or("a state that is not a dict")?;
            state.insert(ParamId(id), of_param.clone());
        }
        Ok(Self { groups, state, initial: BTreeMap::new() })
    }

    /// The optimizer before its first step, with other options.
    pub(crate) fn untrained(&self) -> Result<Self> {
        let mut fresh = self.clone();
        fresh.initial = std::mem::take(&mut fresh.state);
        for state in fresh.initial.values_mut() {
            for (_, value) in state.iter_mut() {
                if let Value::Tensor(tensor) = value {
                    *tensor = zeros_like(tensor)?;
                }
            }
        }
        for group in &mut fresh.groups {
            group.options.insert("lr", 7.0);
        }
        Ok(fresh)
    }
}

impl Optimizer for Adam {
    fn param_groups(&self) -> std::result::Result<Vec<ParamGroup>, CheckpointError> {
        Ok(self.groups.clone())
    }

    fn state(&self) -> std::result::Result<Vec<(ParamId, Dict)>, CheckpointError> {
        Ok(self.state.clone().into_iter().collect())
    }

    fn init_state(&mut self) -> std::result::Result<(), CheckpointError> {
        self.state = self.initial.clone();
        Ok(())
    }

    fn load(
        &mut self,
        groups: Vec<ParamGroup>,
        state: Vec<(ParamId, Dict)>,
    ) -> std::result::Result<(), CheckpointError> {
        self.groups = groups;
        self.state.extend(state);
        Ok(())
    }
}
