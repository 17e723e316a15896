//! The optimizer of ZeRO 3.
//!
//! Every parameter is cut into equal parts by itself, and a rank's buffer has its parts of all parameters, one after
//! another. The last parts are padded with whatever was in memory: a parameter takes its own elements only, so that
//! padding reaches no statistics, average or file. Buffers are closed at a size (`sub_group_size`), which is why one
//! group has several; offsets run over all of them.

use std::sync::Arc;

use dcp_core::CheckpointError;
use indexmap::IndexMap;

use crate::error::{bad, bad_file};
use crate::flat::{Flat, Run, Segment, partition_len};
use crate::model_states::{ModelStates, Shapes};
use crate::parameter::{Masters, Parameter, State};
use crate::rank_file::RankFile;
use crate::rank_optimizer::{GroupStates, RankOptimizer, segment};

/// The buffers of one rank, over all sub groups.
struct RankBuffers {
    weights: Flat,
    flats: IndexMap<Arc<str>, Flat>,
}

impl RankBuffers {
    fn new(rank: &RankOptimizer, groups: u64, files: &[RankFile]) -> Result<Self, CheckpointError> {
        let mut weights = Vec::new();
        let mut states: IndexMap<Arc<str>, Vec<Segment>> = IndexMap::new();
        for group in 0..groups {
            let missing = || bad_file(&rank.name, format!("sub group {group} is missing"));
            weights.push(segment(files, rank, *rank.weights.get(&group).ok_or_else(missing)?)?);
            for (key, entry) in rank.states.get(&group).into_iter().flatten() {
                if is_scalar(files, rank, *entry) {
                    continue;
                }
                let of = states.entry(Arc::clone(key)).or_default();
                if of.len() as u64 != group {
                    let problem =
                        format!("sub group {group} has {key:?}, and one before it has none");
                    return Err(bad_file(&rank.name, problem));
                }
                of.push(segment(files, rank, *entry)?);
            }
        }
        let flats = states.into_iter().map(|(key, of)| (key, Flat::new(of))).collect();
        Ok(Self { weights: Flat::new(weights), flats })
    }
}

fn is_scalar(files: &[RankFile], rank: &RankOptimizer, entry: usize) -> bool {
    let tensor = files.get(rank.part).and_then(|file| file.tensor(entry));
    tensor.is_none_or(|tensor| tensor.shape.ndim() == 0)
}

/// The runs of a tensor of `numel` elements, of which each rank has a part at `at`.
fn gathered<'f>(
    flats: impl Iterator<Item = Option<&'f Flat>>,
    at: u64,
    part: u64,
    numel: u64,
) -> Option<Vec<Run>> {
    let mut left = numel;
    let mut runs = Vec::new();
    for flat in flats {
        let own = left.min(part);
        runs.extend(flat?.slice(at..at.checked_add(own)?)?);
        left -= own;
    }
    (left == 0).then_some(runs)
}

pub(crate) fn masters(
    shapes: &[Shapes],
    ranks: &[RankOptimizer],
    files: &[RankFile],
) -> Result<Masters, CheckpointError> {
    let groups = shapes.len() as u64;
    let world = ranks.len() as u64;
    let mut buffers = Vec::with_capacity(ranks.len());
    for rank in ranks {
        if rank.weights.len() as u64 != groups {
            let problem =
                format!("it has {} sub groups, and param_shapes {groups}", rank.weights.len());
            return Err(bad_file(&rank.name, problem));
        }
        buffers.push(RankBuffers::new(rank, groups, files)?);
    }
    let mut found = Masters::default();
    let Some((first, own)) = ranks.first().zip(buffers.first()) else { return Ok(found) };
    let keys: Vec<&Arc<str>> = own.flats.keys().collect();
    for (rank, buffers) in ranks.iter().zip(&buffers) {
        if buffers.flats.len() != keys.len()
            || keys.iter().any(|key| !buffers.flats.contains_key(*key))
        {
            let problem = format!("the optimizer's state is not that of {:?}", first.name);
            return Err(bad_file(&rank.name, problem));
        }
    }
    let mut at = 0_u64;
    for (group, shapes) in (0..).zip(shapes) {
        let none = GroupStates::new();
        let values = first.states.get(&group).unwrap_or(&none);
        let scalars = values.iter().filter(|(_, entry)| is_scalar(files, first, **entry));
        let scalars: Vec<_> = scalars.map(|(key, entry)| (Arc::clone(key), *entry)).collect();
        for (name, shape) in shapes {
            let too_few = |what: &str| {
                bad(format!("{what} of a rank ends before its part of {name:?}, at element {at}"))
            };
            let numel = shape.checked_volume().ok_or_else(|| too_few("the buffer"))?;
            let part = partition_len(numel, world);
            let weights = buffers.iter().map(|of| Some(&of.weights));
            let weights = gathered(weights, at, part, numel)
                .ok_or_else(|| too_few("the buffer of weights"))?;
            let mut states = IndexMap::new();
            for key in &keys {
                let flats = buffers.iter().map(|of| of.flats.get(*key));
                let runs = gathered(flats, at, part, numel);
                let runs = runs.ok_or_else(|| too_few(&format!("the buffer of {key:?}")))?;
                states.insert(Arc::clone(key), State::Elements(runs));
            }
            for (key, entry) in &scalars {
                states.insert(Arc::clone(key), State::Entry { part: first.part, entry: *entry });
            }
            at = at.checked_add(part).ok_or_else(|| too_few("the buffer"))?;
            let weights = State::Elements(weights);
            let parameter = Parameter { shape: shape.clone(), weights, states };
            if found.parameters.insert(Arc::clone(name), parameter).is_some() {
                return Err(bad(format!("{name:?} is in two sub groups")));
            }
        }
    }
    for (rank, buffers) in ranks.iter().zip(&buffers) {
        if let Some(flat) = std::iter::once(&buffers.weights)
            .chain(buffers.flats.values())
            .find(|flat| flat.len() != at)
        {
            let problem = format!(
                "its buffers have {} elements, and its parts of the parameters {at}: the files are of different saves",
                flat.len()
            );
            return Err(bad_file(&rank.name, problem));
        }
    }
    // A group has the sub groups that its list of parameters numbers.
    for members in first.group_members.values() {
        let of = members.iter().filter_map(|group| shapes.get(usize::try_from(*group).ok()?));
        found.groups.names.push(of.flat_map(|shapes| shapes.keys().cloned()).collect());
    }
    Ok(found)
}

/// The frozen parameters: every rank has a part of each.
pub(crate) fn frozen(
    models: &[&ModelStates],
    files: &[RankFile],
) -> Result<IndexMap<Arc<str>, Parameter>, CheckpointError> {
    let mut found = IndexMap::new();
    let Some(first) = models.first() else { return Ok(found) };
    for (name, shape) in &first.frozen {
        let mut flats = Vec::with_capacity(models.len());
        for model in models {
            let entry = model.fragments.get(name).copied();
            let tensor = entry.and_then(|entry| files.get(model.part)?.tensor(entry));
            let len = tensor.and_then(|tensor| tensor.shape.checked_volume());
            let Some((entry, len)) = entry.zip(len) else {
                return Err(bad_file(
                    &model.name,
                    format!("it has no part of the frozen {name:?}"),
                ));
            };
            flats.push(Flat::new(vec![Segment { part: model.part, entry, len }]));
        }
        let runs = shape.checked_volume().and_then(|numel| {
            let part = partition_len(numel, models.len() as u64);
            gathered(flats.iter().map(Some), 0, part, numel)
        });
        let Some(weights) = runs else {
            let problem =
                format!("the parts of the frozen {name:?} are not those of shape {shape}");
            return Err(bad_file(&first.name, problem));
        };
        let (weights, states) = (State::Elements(weights), IndexMap::new());
        let parameter = Parameter { shape: shape.clone(), weights, states };
        found.insert(Arc::clone(name), parameter);
    }
    Ok(found)
}
