//! State dicts set on models and optimizers.

use std::collections::{HashMap, HashSet};

use dcp_core::value::Dict;
use dcp_core::{CheckpointError, PlanError, StateDict, Tensor, Value};
use dcp_engine::Group;
use dcp_planner::{FlattenRule, flatten, set_at_path};

use crate::broadcast::broadcast;
use crate::elements::{self, unfit};
use crate::error::{IncompatibleKeys, StateDictError};
use crate::fqn::Fqns;
use crate::get::{Optimizers, key_of, parts_of};
use crate::layout::{Given, Parts};
use crate::model::Model;
use crate::options::StateDictOptions;

/// Sets the state dict of a model. Tensors that are not the model's own are copied into its memory;
/// of a whole one, each rank takes its shards.
///
/// Returns the keys that do not fit, which [`StateDictOptions::strict`] refuses by default.
///
/// # Errors
///
/// [`StateDictError`] (as [`CheckpointError::Plugin`]) when keys, dtypes or shapes do not fit; the
/// model is then unchanged. With [`StateDictOptions::broadcast_from_rank0`], on all ranks.
pub async fn set_model_state_dict<M: Model + ?Sized>(
    model: &mut M,
    state: StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys, CheckpointError> {
    options.check()?;
    let (local, mut names) = match Local::of(model, options) {
        Ok(Local { state, names, optional }) => (Ok(state), Ok((names, optional))),
        Err(error) => (Err(error), Err(())),
    };
    let judge = |mut keys: IncompatibleKeys| {
        if let Ok((_, optional)) = &names {
            keys.missing.retain(|key| !optional.contains(key));
        }
        keys.allowed(options.strict)
    };
    let (loaded, keys) = if options.broadcast_from_rank0 {
        let group = Group::new(options.group.clone(), 0)?;
        group.run(async |group| broadcast(group, Ok(state), local, judge).await).await?
    } else {
        let local = local?;
        let keys = judge(differences(&local, &state))?;
        let known = |(key, _): &(Value, Value)| local.get_value(key).is_some();
        let state: Dict = state.into_iter().filter(known).collect();
        if let Some(fqn) = no_tensor(&local, &state) {
            return Err(unfit(&fqn, "it is a tensor, in the state dict a plain value"));
        }
        (fit(state, &local).await?, keys)
    };
    let mut name = |key: &str| names.as_mut().ok().and_then(|(names, _)| names.remove(key));
    let loaded = loaded.into_iter().filter_map(|(key, value)| Some((name(key.as_str()?)?, value)));
    model.load(loaded.collect())?;
    Ok(keys)
}

/// Sets the state dict of optimizers, in the nested or the flattened layout, whatever the options
/// say; also one of `torch.optim`, which has numbers of parameters. Where no parameter has a state,
/// it is created first. Groups are found by the FQNs of their parameters.
///
/// # Errors
///
/// As [`set_model_state_dict`], and when a trained parameter has no state in the state dict.
pub async fn set_optimizer_state_dict<M: Model + ?Sized>(
    model: &M,
    optimizers: Optimizers<'_, '_>,
    state: StateDict,
    options: &StateDictOptions,
) -> Result<(), CheckpointError> {
    options.check()?;
    let own = own_parts(model, optimizers, options);
    let loaded = if options.broadcast_from_rank0 {
        let group = Group::new(options.group.clone(), 0)?;
        let (own, local) = match own {
            Ok((fqns, all)) => {
                let local = merged(&all, &fqns).map_err(CheckpointError::from);
                (Ok((fqns, all)), local)
            }
            Err(error) => (Err(()), Err(error)),
        };
        let full = match &own {
            Ok((fqns, all)) if group.context().rank == 0 => {
                let found = find(&state, all, fqns, options);
                found.and_then(|all| Ok(merged(&all, fqns)?))
            }
            _ => Ok(StateDict::new()),
        };
        let judge = |mut keys: IncompatibleKeys| {
            keys.missing.retain(|key| key.contains(".state."));
            keys.unexpected.clear();
            keys.allowed(options.strict)
        };
        let exchange = async |group: &Group| broadcast(group, full, local, judge).await;
        let (loaded, _) = group.run(exchange).await?;
        own.ok().map(|(fqns, all)| (fqns, all, loaded))
    } else {
        let (fqns, all) = own?;
        let local = merged(&all, &fqns)?;
        let found = find(&state, &all, &fqns, options)?;
        let loaded = fit(merged(&found, &fqns)?, &local).await?;
        Some((fqns, found, loaded))
    };
    let Some((fqns, all, mut loaded)) = loaded else { return Ok(()) };
    for (number, (optimizer, parts)) in optimizers.iter_mut().zip(all).enumerate() {
        let Some(Value::Dict(dict)) = loaded.remove(&key_of_optimizer(number)) else { continue };
        let mut parts = parts.with_dict(dict, &fqns)?;
        let ids: Vec<_> =
            parts.groups.iter().flat_map(|group| group.params.iter().copied()).collect();
        let state = ids.into_iter().filter_map(|id| Some((id, parts.state.remove(&id)?)));
        let state = state.collect();
        optimizer.load(parts.groups, state)?;
    }
    Ok(())
}

/// Sets the state dicts of optimizers and then of their model.
///
/// # Errors
///
/// As [`set_model_state_dict`] and [`set_optimizer_state_dict`].
pub async fn set_state_dict<M: Model + ?Sized>(
    model: &mut M,
    optimizers: Optimizers<'_, '_>,
    model_state: StateDict,
    optimizer_state: StateDict,
    options: &StateDictOptions,
) -> Result<IncompatibleKeys, CheckpointError> {
    set_optimizer_state_dict(model, optimizers, optimizer_state, options).await?;
    set_model_state_dict(model, model_state, options).await
}

/// The present state of the model.
struct Local {
    state: StateDict,
    /// The names in the model, by key.
    names: HashMap<String, String>,
    /// Keys that a state dict may lack.
    optional: HashSet<String>,
}

impl Local {
    fn of<M: Model + ?Sized>(
        model: &M,
        options: &StateDictOptions,
    ) -> Result<Self, CheckpointError> {
        let (mut state, mut names) = (StateDict::new(), HashMap::new());
        let mut optional = HashSet::new();
        for (fqn, entry) in Fqns::of(model, options)?.entries {
            let Some(key) = key_of(&fqn, options) else { continue };
            if entry.frozen && options.ignore_frozen_params {
                optional.insert(key.to_owned());
            }
            state.insert(key, entry.value);
            if let Some(first) = names.insert(key.to_owned(), entry.name.clone()) {
                let (fqn, second) = (key.to_owned(), entry.name);
                return Err(StateDictError::DuplicateFqn { fqn, first, second }.into());
            }
        }
        Ok(Self { state, names, optional })
    }
}

fn differences(local: &StateDict, given: &StateDict) -> IncompatibleKeys {
    let absent = |from: &StateDict, keys: &StateDict| {
        let keys = keys.iter().filter(|(key, _)| from.get_value(key).is_none());
        keys.filter_map(|(key, _)| Some(dcp_core::value::python_str(key)?.to_string())).collect()
    };
    IncompatibleKeys { missing: absent(given, local), unexpected: absent(local, given) }
}

/// The first key that is a tensor of the model and none of the state dict.
fn no_tensor(local: &StateDict, given: &StateDict) -> Option<String> {
    let is_tensor = |value: Option<&Value>| value.is_some_and(|value| value.as_tensor().is_some());
    let mut keys = given.iter().filter_map(|(key, value)| Some((key.as_str()?, value)));
    let found = keys.find(|(key, value)| is_tensor(local.get(key)) && !is_tensor(Some(value)));
    found.map(|(key, _)| key.to_owned())
}

/// The given values, with tensors in the layout and the memory of those of `local`.
async fn fit(mut given: StateDict, local: &StateDict) -> Result<StateDict, CheckpointError> {
    let own: HashMap<_, _> = tensors(local)?.into_iter().map(|(fqn, _, own)| (fqn, own)).collect();
    let given_tensors = tensors(&given)?;
    for (fqn, _, tensor) in &given_tensors {
        if let Some(own) = own.get(fqn) {
            elements::check(fqn, own, tensor.dtype(), tensor.shape())?;
            elements::check_cover(fqn, own, tensor)?;
        }
    }
    for (fqn, path, tensor) in given_tensors {
        if let Some(own) = own.get(&fqn) {
            let tensor = elements::fit(&fqn, own, &tensor).await?;
            set_at_path(&mut given, &path, tensor.into())?;
        }
    }
    Ok(given)
}

type PlacedTensor = (std::sync::Arc<str>, dcp_core::path::StatePath, Tensor);

fn tensors(state: &StateDict) -> Result<Vec<PlacedTensor>, PlanError> {
    let placed = flatten(state, FlattenRule::Torch24)?.into_iter().filter_map(|leaf| {
        let tensor = leaf.value.as_tensor()?.clone();
        Some((leaf.fqn, leaf.path.unwrap_or_default(), tensor))
    });
    Ok(placed.collect())
}

fn own_parts<M: Model + ?Sized>(
    model: &M,
    optimizers: Optimizers<'_, '_>,
    options: &StateDictOptions,
) -> Result<(Fqns, Vec<Parts>), CheckpointError> {
    let fqns = Fqns::of(model, options)?;
    let mut all = Vec::new();
    for optimizer in optimizers {
        all.push(parts_of(*optimizer)?);
    }
    Ok((fqns, all))
}

/// Finds the groups and states in a state dict that each optimizer is to load.
fn find(
    state: &StateDict,
    all: &[Parts],
    fqns: &Fqns,
    options: &StateDictOptions,
) -> Result<Vec<Parts>, CheckpointError> {
    let mut given = Given::read(state, all, fqns)?;
    let mut keys = IncompatibleKeys::default();
    let found = all
        .iter()
        .map(|own| given.for_optimizer(own, fqns, options.strict, &mut keys.missing))
        .collect::<Result<Vec<_>, _>>()?;
    keys.allowed(options.strict)?;
    Ok(found)
}

fn key_of_optimizer(number: usize) -> String {
    format!("optimizer{number}")
}

/// The states and options of all optimizers as one dict.
fn merged(all: &[Parts], fqns: &Fqns) -> Result<StateDict, StateDictError> {
    let dicts = all.iter().enumerate();
    dicts.map(|(number, parts)| Ok((key_of_optimizer(number), parts.to_dict(fqns)?))).collect()
}
