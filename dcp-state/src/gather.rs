//! Whole tensors of the shards of all ranks.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::error::Phase;
use dcp_core::overlap::find_overlap;
use dcp_core::path::StatePath;
use dcp_core::text::Quoted;
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointError, PlanError, Region, StateDict, Tensor};
use dcp_engine::Group;
use dcp_planner::{FlattenRule, flatten, set_at_path};
use indexmap::IndexMap;

use crate::elements::{self, unfit};
use crate::error::StateDictError;

/// The first bytes of a message with the shards of a tensor.
const SHARDS: [u8; 4] = *b"dsh1";

/// The state dict with whole tensors in place of sharded ones, one at a time. With `only_rank0`
/// the other ranks get an empty one.
pub(crate) async fn gather(
    group: &Group,
    state: Result<StateDict, CheckpointError>,
    only_rank0: bool,
) -> Result<StateDict, CheckpointError> {
    let mine = state.and_then(|state| {
        let sharded = sharded(&state)?;
        Ok((described(&sharded), (state, sharded)))
    });
    let (all, (state, sharded)) = group.all_gather_with(Phase::Plan, mine).await?;
    // All ranks compare the same lists.
    same_on_all(&all)?;
    let is_kept = !only_rank0 || group.context().rank == 0;
    let (mut whole, mut failed) = (if is_kept { state } else { StateDict::new() }, None);
    for (fqn, path, tensor) in sharded {
        let mine = message(&fqn, &tensor).await;
        let all = if only_rank0 {
            let mine = group.all_succeed(Phase::Read, mine).await?;
            group.gather(Phase::Read, mine).await?
        } else {
            Some(group.exchange(Phase::Read, mine).await?)
        };
        // A rank that fails here still takes part in the messages of the other tensors.
        if let (true, Some(all)) = (is_kept, all) {
            let assembled = assemble(&fqn, &tensor, &all)
                .and_then(|tensor| Ok(set_at_path(&mut whole, &path, tensor.into())?));
            failed = failed.or(assembled.err());
        }
    }
    group.all_succeed(Phase::Read, failed.map_or(Ok(whole), Err)).await
}

/// The sharded tensors of a state dict, with their places.
fn sharded(state: &StateDict) -> Result<Vec<(Arc<str>, StatePath, Tensor)>, PlanError> {
    let tensors = flatten(state, FlattenRule::Torch24)?.into_iter().filter_map(|leaf| {
        let tensor = leaf.value.as_tensor().filter(|tensor| tensor.is_sharded())?;
        Some((leaf.fqn, leaf.path.unwrap_or_default(), tensor.clone()))
    });
    Ok(tensors.collect())
}

fn described(tensors: &[(Arc<str>, StatePath, Tensor)]) -> Vec<String> {
    let described = |(fqn, _, tensor): &(Arc<str>, StatePath, Tensor)| {
        format!("{} of {} {}", Quoted(fqn), tensor.dtype(), tensor.shape())
    };
    tensors.iter().map(described).collect()
}

fn same_on_all(all: &[Vec<String>]) -> Result<(), StateDictError> {
    let Some((first, others)) = all.split_first() else { return Ok(()) };
    let other = others.iter().zip(1..).find(|(other, _)| *other != first);
    let Some((other, rank)) = other else { return Ok(()) };
    let at = first.iter().zip(other).take_while(|(a, b)| a == b).count();
    let shown = |list: &[String]| list.get(at).cloned().unwrap_or_else(|| "nothing more".into());
    Err(StateDictError::RanksDiffer { rank, first: shown(first), theirs: shown(other) })
}

/// The shards of this rank: their regions and elements.
async fn message(fqn: &str, tensor: &Tensor) -> Result<Bytes, CheckpointError> {
    let mut message = MessageWriter::new(SHARDS);
    message.number(tensor.shards().len() as u64);
    for shard in tensor.shards() {
        message.dims(shard.region().offsets());
        message.dims(shard.region().sizes());
        let mut bytes = Vec::new();
        for piece in elements::pieces(shard.region(), tensor.dtype()) {
            bytes.extend_from_slice(&elements::read(fqn, shard, &piece).await?);
        }
        message.bytes(&bytes);
    }
    Ok(message.finish())
}

/// The whole tensor of the shards of all ranks, which hold each element.
fn assemble(fqn: &str, like: &Tensor, all: &[Bytes]) -> Result<Tensor, CheckpointError> {
    let mut shards: IndexMap<Region, &[u8]> = IndexMap::new();
    for message in all {
        let mut message = MessageReader::new(message, SHARDS)?;
        for _ in 0..message.count()? {
            let region = Region::new(message.dims()?, message.dims()?)?;
            shards.entry(region).or_insert(message.bytes()?);
        }
        message.finish()?;
    }
    let rows: Vec<_> = shards.keys().map(|r| (&**r.offsets(), &**r.sizes())).collect();
    let overlap = find_overlap(&rows).map_err(|error| unfit(fqn, error.to_string()))?;
    let held = shards.keys().map(Region::volume).fold(0, u64::saturating_add);
    let expected = Region::full(like.shape().clone())?.volume();
    if overlap.is_some() || held != expected {
        let problem = format!("the shards of all ranks hold {held} elements of {expected}");
        return Err(unfit(fqn, problem));
    }
    let whole = Tensor::zeros(like.dtype(), like.shape().clone())?;
    for (region, bytes) in shards {
        for shard in whole.shards() {
            let view = shard.host_view(fqn)?.narrow(&region)?;
            let filled = view.fill_from(bytes);
            filled.map_err(|source| CheckpointError::Memory { fqn: fqn.to_owned(), source })?;
        }
    }
    Ok(whole)
}
