//! State dicts of models and optimizers.

use dcp_core::{CheckpointError, StateDict, Value};
use dcp_engine::Group;
use dcp_planner::{FlattenRule, flatten, set_at_path};

use crate::elements::to_host;
use crate::error::StateDictError;
use crate::fqn::Fqns;
use crate::gather::gather;
use crate::layout::{Parts, flattened, nested};
use crate::model::Model;
use crate::optimizer::Optimizer;
use crate::options::StateDictOptions;

/// The optimizers that a state dict is of; several are merged into one.
pub type Optimizers<'a, 'b> = &'a mut [&'b mut (dyn Optimizer + Send)];

/// The state dict of a model: tensors by FQN, which share the model's memory, or whole ones with
/// [`StateDictOptions::full_state_dict`].
///
/// # Errors
///
/// [`StateDictError`] (as [`CheckpointError::Plugin`]) when names clash; on all ranks, when a rank
/// fails.
pub async fn get_model_state_dict<M: Model + ?Sized>(
    model: &M,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    finish(model_state(model, options), options).await
}

/// The state dict of optimizers: `{"state": {fqn: state}, "param_groups": [{options, "params":
/// [fqn]}]}`, or the flattened layout. Where no parameter has a state, it is created first.
///
/// # Errors
///
/// As [`get_model_state_dict`], and when a parameter is not in the model.
pub async fn get_optimizer_state_dict<M: Model + ?Sized>(
    model: &M,
    optimizers: Optimizers<'_, '_>,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    finish(optimizer_state(model, optimizers, options), options).await
}

/// The state dicts of a model and its optimizers.
///
/// # Errors
///
/// As [`get_optimizer_state_dict`].
pub async fn get_state_dict<M: Model + ?Sized>(
    model: &M,
    optimizers: Optimizers<'_, '_>,
    options: &StateDictOptions,
) -> Result<(StateDict, StateDict), CheckpointError> {
    let of_model = get_model_state_dict(model, options).await?;
    Ok((of_model, get_optimizer_state_dict(model, optimizers, options).await?))
}

/// The model's state dict on this rank, without communication.
pub(crate) fn model_state<M: Model + ?Sized>(
    model: &M,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    options.check()?;
    let fqns = Fqns::of(model, options)?;
    let mut state = StateDict::new();
    let mut names = std::collections::HashMap::new();
    for (fqn, entry) in fqns.entries {
        let Some(key) = key_of(&fqn, options) else { continue };
        if entry.frozen && options.ignore_frozen_params {
            continue;
        }
        if state.insert(key, entry.value).is_some() {
            let first = names.remove(key).unwrap_or_default();
            let (fqn, second) = (key.to_owned(), entry.name);
            return Err(StateDictError::DuplicateFqn { fqn, first, second }.into());
        }
        names.insert(key.to_owned(), entry.name);
    }
    Ok(state)
}

/// The key of an entry; `None` outside of the submodules.
pub(crate) fn key_of<'a>(fqn: &'a str, options: &StateDictOptions) -> Option<&'a str> {
    if options.submodules.is_empty() {
        return Some(fqn);
    }
    let below = |module: &String| fqn.strip_prefix(&**module)?.strip_prefix('.');
    let rest = options.submodules.iter().find_map(below)?;
    Some(if options.keep_submodule_prefixes { fqn } else { rest })
}

/// The optimizers' state dict on this rank, without communication.
pub(crate) fn optimizer_state<M: Model + ?Sized>(
    model: &M,
    optimizers: Optimizers<'_, '_>,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    options.check()?;
    let fqns = Fqns::of(model, options)?;
    let mut all = Vec::new();
    for optimizer in optimizers {
        all.push(parts_of(*optimizer)?);
    }
    Ok(match options.flatten_optimizer_state_dict {
        true => flattened(&all, &fqns)?,
        false => nested(&all, &fqns)?,
    })
}

/// The groups and states of an optimizer, which are created where there are none.
pub(crate) fn parts_of(optimizer: &mut (dyn Optimizer + Send)) -> Result<Parts, CheckpointError> {
    if optimizer.state()?.is_empty() {
        optimizer.init_state()?;
    }
    current_parts(optimizer)
}

/// The groups and states of an optimizer as they are.
pub(crate) fn current_parts(optimizer: &dyn Optimizer) -> Result<Parts, CheckpointError> {
    let state = optimizer.state()?.into_iter().collect();
    Ok(Parts { groups: optimizer.param_groups()?, state })
}

/// Gathers and offloads, as the options say. An error of this rank reaches the others.
async fn finish(
    state: Result<StateDict, CheckpointError>,
    options: &StateDictOptions,
) -> Result<StateDict, CheckpointError> {
    let state = match state {
        Ok(state) if options.cpu_offload => offload(state).await,
        other => other,
    };
    if !options.full_state_dict {
        return state;
    }
    let only_rank0 = options.is_kept_by_rank0();
    let group = Group::new(options.group.clone(), 0)?;
    group.run(async |group| gather(group, state, only_rank0).await).await
}

async fn offload(mut state: StateDict) -> Result<StateDict, CheckpointError> {
    let mut copied = Vec::new();
    for leaf in flatten(&state, FlattenRule::Torch24)? {
        if let Value::Tensor(tensor) = leaf.value {
            copied.push((leaf.path.unwrap_or_default(), to_host(&leaf.fqn, tensor).await?));
        }
    }
    for (path, tensor) in copied {
        set_at_path(&mut state, &path, tensor.into())?;
    }
    Ok(state)
}
