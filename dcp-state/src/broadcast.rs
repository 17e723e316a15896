//! The state dict of rank 0, set on all ranks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::error::Phase;
use dcp_core::{CheckpointError, DType, PlanError, Region, StateDict, Tensor, Value};
use dcp_engine::Group;
use dcp_planner::{FlatEntry, FlattenRule, flatten, set_at_path};

use crate::elements::{self, unfit};
use crate::error::{IncompatibleKeys, StateDictError};

/// Tensors of at most this length travel with the keys, such as the steps of an optimizer.
const SMALL_BYTES: u64 = 4096;

/// A value of rank 0, as all ranks know it.
enum Announced {
    Value(Value),
    /// Its elements follow.
    Tensor(DType, Vec<u64>),
}

/// `local` with the values of `full`, which rank 0 alone has. Each rank takes its shards of the
/// tensors, which travel one piece at a time. Keys that `local` does not have are left out.
///
/// # Errors
///
/// On all ranks, when `full` is an error, `judge` refuses the keys that rank 0 lacks or has in
/// addition, or values of a rank do not fit.
pub(crate) async fn broadcast(
    group: &Group,
    full: Result<StateDict, CheckpointError>,
    local: Result<StateDict, CheckpointError>,
    judge: impl FnOnce(IncompatibleKeys) -> Result<IncompatibleKeys, StateDictError>,
) -> Result<(StateDict, IncompatibleKeys), CheckpointError> {
    let is_first = group.context().rank == 0;
    let full = if is_first { Some(full) } else { None };
    let (header, full) = match full {
        None => (None, None),
        Some(Ok(full)) => match announce(&full).await {
            Ok(header) => (Some(Ok(header)), Some(full)),
            Err(error) => (Some(Err(error)), None),
        },
        Some(Err(error)) => (Some(Err(error)), None),
    };
    let header = group.broadcast(Phase::Plan, 0, header).await?;
    let mine = local.and_then(|local| {
        let announced = read_header(&header)?;
        let keys = judge(differences(&local, &announced)?)?;
        check(&local, &announced)?;
        Ok((local, announced, keys))
    });
    let (mut local, announced, keys) = group.all_succeed(Phase::Plan, mine).await?;

    let sources = full.as_ref().map(tensors).transpose()?.unwrap_or_default();
    let places: HashMap<Arc<str>, (dcp_core::path::StatePath, Option<Tensor>)> = leaves(&local)?
        .into_iter()
        .map(|leaf| {
            let tensor = leaf.value.as_tensor().cloned();
            (leaf.fqn, (leaf.path.unwrap_or_default(), tensor))
        })
        .collect();
    let mut failed: Option<CheckpointError> = None;
    for (fqn, value) in announced {
        let place = places.get(&*fqn);
        let received = match value {
            Announced::Value(value) => match (place, value) {
                (Some((_, Some(own))), Value::Tensor(given)) => {
                    elements::fit(&fqn, own, &given).await.map(|tensor| Some(tensor.into()))
                }
                (_, value) => Ok(Some(value)),
            },
            Announced::Tensor(dtype, shape) => {
                let own = place.and_then(|(_, own)| own.as_ref());
                let source = sources.get(&*fqn);
                let shape = Region::full(shape.as_slice())?;
                let received = receive(group, &fqn, source, own, dtype, &shape).await?;
                received.map(|tensor| tensor.map(Value::from))
            }
        };
        // A rank that fails here still takes part in the messages of the other tensors.
        let set = received.and_then(|value| match (place, value) {
            (Some((path, _)), Some(value)) => Ok(set_at_path(&mut local, path, value)?),
            _ => Ok(()),
        });
        failed = failed.or(set.err());
    }
    let local = group.all_succeed(Phase::Read, failed.map_or(Ok(local), Err)).await?;
    Ok((local, keys))
}

/// Takes part in the messages of one tensor; the inner error is this rank's alone.
async fn receive(
    group: &Group,
    fqn: &str,
    source: Option<&Tensor>,
    own: Option<&Tensor>,
    dtype: DType,
    whole: &Region,
) -> Result<Result<Option<Tensor>, CheckpointError>, CheckpointError> {
    let is_first = group.context().rank == 0;
    let is_there = source.zip(own).is_some_and(|(a, b)| elements::is_same_memory(a, b));
    let mut target = own.map(elements::destination).transpose();
    for piece in elements::pieces(whole, dtype) {
        let mine = match source {
            Some(source) if is_first => Some(read_whole(fqn, source, &piece).await),
            _ => None,
        };
        let bytes = group.broadcast(Phase::Read, 0, mine).await?;
        if let Ok(Some(tensor)) = &target
            && !is_there
            && let Err(error) = elements::spread(fqn, tensor, &piece, &bytes).await
        {
            target = Err(error);
        }
    }
    Ok(target)
}

async fn read_whole(fqn: &str, source: &Tensor, piece: &Region) -> Result<Bytes, CheckpointError> {
    let holds = source.shards().iter().find(|shard| shard.region().contains(piece));
    let shard = holds.ok_or_else(|| {
        unfit(fqn, "rank 0 does not hold the whole tensor; `full_state_dict` gathers it")
    })?;
    elements::read(fqn, shard, piece).await
}

fn leaves(state: &StateDict) -> Result<Vec<FlatEntry<'_>>, PlanError> {
    flatten(state, FlattenRule::Torch24)
}

fn tensors(state: &StateDict) -> Result<HashMap<Arc<str>, Tensor>, PlanError> {
    let tensor = |leaf: FlatEntry<'_>| Some((leaf.fqn, leaf.value.as_tensor()?.clone()));
    Ok(leaves(state)?.into_iter().filter_map(tensor).collect())
}

/// The keys of rank 0, each with its value or the dtype and shape of its tensor.
async fn announce(full: &StateDict) -> Result<Bytes, CheckpointError> {
    let mut announced = Vec::new();
    for leaf in leaves(full)? {
        let fqn = Value::from(Arc::clone(&leaf.fqn));
        announced.push(Value::Tuple(match leaf.value {
            Value::Tensor(tensor) => {
                let whole = Region::full(tensor.shape().clone())?;
                let byte_len = whole.volume().saturating_mul(tensor.dtype().size() as u64);
                if byte_len <= SMALL_BYTES {
                    let bytes = read_whole(&leaf.fqn, tensor, &whole).await?.to_vec();
                    let shape = tensor.shape().clone();
                    vec![fqn, Tensor::replicated(tensor.dtype(), shape, bytes)?.into()]
                } else {
                    let shape = Value::from(tensor.shape().to_vec());
                    vec![fqn, tensor.dtype().to_string().into(), shape]
                }
            }
            value => vec![fqn, value.clone()],
        }));
    }
    Ok(Value::List(announced).to_wire()?)
}

fn read_header(header: &[u8]) -> Result<Vec<(String, Announced)>, CheckpointError> {
    let bad = || {
        PlanError::message(
            "the keys of rank 0",
            "an entry is neither a name and a tensor nor a name and a value",
        )
    };
    let Value::List(entries) = Value::from_wire(header)? else { return Err(bad().into()) };
    let entries = entries.into_iter().map(|entry| {
        let Value::Tuple(entry) = entry else { return Err(bad()) };
        match <[Value; 3]>::try_from(entry) {
            Ok([Value::Str(fqn), Value::Str(dtype), Value::List(shape)]) => {
                let dtype = dtype.parse().map_err(|_| bad())?;
                let size = |size: &Value| u64::try_from(size.as_int()?).ok();
                let shape = shape.iter().map(size).collect::<Option<_>>().ok_or_else(bad)?;
                Ok((fqn.to_string(), Announced::Tensor(dtype, shape)))
            }
            Ok(_) => Err(bad()),
            Err(entry) => match <[Value; 2]>::try_from(entry) {
                Ok([Value::Str(fqn), value]) => Ok((fqn.to_string(), Announced::Value(value))),
                _ => Err(bad()),
            },
        }
    });
    Ok(entries.collect::<Result<_, PlanError>>()?)
}

/// The keys that rank 0 lacks, and those that it has in addition.
fn differences(
    local: &StateDict,
    announced: &[(String, Announced)],
) -> Result<IncompatibleKeys, CheckpointError> {
    let local = leaves(local)?;
    let own: HashSet<&str> = local.iter().map(|leaf| &*leaf.fqn).collect();
    let theirs: HashSet<&str> = announced.iter().map(|(fqn, _)| &**fqn).collect();
    let missing = local.iter().filter(|leaf| !theirs.contains(&*leaf.fqn));
    let unexpected = announced.iter().filter(|(fqn, _)| !own.contains(&**fqn));
    Ok(IncompatibleKeys {
        missing: missing.map(|leaf| leaf.fqn.to_string()).collect(),
        unexpected: unexpected.map(|(fqn, _)| fqn.clone()).collect(),
    })
}

/// Refuses tensors that do not fit before any is sent.
fn check(local: &StateDict, announced: &[(String, Announced)]) -> Result<(), CheckpointError> {
    let own = tensors(local)?;
    for (fqn, value) in announced {
        match (own.get(&**fqn), value) {
            (Some(own), Announced::Tensor(dtype, shape)) => {
                elements::check(fqn, own, *dtype, shape)?;
            }
            (Some(own), Announced::Value(Value::Tensor(given))) => {
                elements::check(fqn, own, given.dtype(), given.shape())?;
            }
            (Some(_), Announced::Value(_)) => {
                return Err(unfit(fqn, "it is a tensor, in the state dict a plain value"));
            }
            (None, _) => {}
        }
    }
    Ok(())
}
