//! The optimizer of ZeRO 1 and 2, in the files of the data-parallel ranks.
//!
//! The parameters of a group are one buffer, cut into equal parts for the ranks. Offsets are counted by
//! `param_shapes`, never by `param_slice_mappings`: with `round_robin_gradients` the buffer has another order than
//! the mappings say, which is why DeepSpeed's own universal converter writes wrong weights of it. Between parameters
//! may be unused elements (`param_alignment_paddings`), after the last the padding to equal parts. A group of
//! experts is one buffer for each expert-parallel rank, shared by fewer ranks, and its names count the experts of
//! one rank only.

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::{CheckpointError, Value};
use indexmap::IndexMap;

use crate::error::{bad, bad_file};
use crate::flat::{Flat, Segment};
use crate::model_states::{ModelStates, Shapes};
use crate::parameter::{Groups, Masters, Parameter, State};
use crate::rank_file::RankFile;
use crate::rank_optimizer::{GroupStates, RankOptimizer, segment};
use crate::zero3;

/// Finds every parameter of one model-parallel rank.
pub(crate) fn masters(
    model: &ModelStates,
    ranks: &[RankOptimizer],
    files: &[RankFile],
) -> Result<Masters, CheckpointError> {
    let Some(shapes) = &model.groups else {
        let problem = "it has no param_shapes, and there are files of ZeRO's optimizer";
        return Err(bad_file(&model.name, problem));
    };
    let Some(first) = ranks.first() else { return Ok(Masters::default()) };
    let stage = |rank: &RankOptimizer| (rank.is_stage3, rank.stage);
    if let Some(other) = ranks.iter().find(|rank| stage(rank) != stage(first)) {
        return Err(bad_file(&other.name, format!("it is of another stage than {:?}", first.name)));
    }
    let world = ranks.len() as u64;
    for rank in ranks {
        let said = rank.partitions.as_ref().and_then(|counts| counts.iter().max().copied());
        if let Some(said) = said.filter(|said| *said != world) {
            let problem = format!(
                "it is of a save of {said} ranks, and there are files of {world}: some are missing, or of another \
                 save; copy all files of one save"
            );
            return Err(bad_file(&rank.name, problem));
        }
        if rank.partitions != first.partitions || rank.version != first.version {
            let problem = format!("its partitions or version are not those of {:?}", first.name);
            return Err(bad_file(&rank.name, problem));
        }
    }
    let mut found = match first.is_stage3 {
        true => zero3::masters(shapes, ranks, files)?,
        false => of_groups(model, shapes, ranks, files)?,
    };
    found.groups.settings = first.settings();
    found.loss_scaler = first.loss_scaler.map(|entry| (first.part, entry));
    Ok(found)
}

/// The ranks that share a group, for each of the groups that one group of experts is.
fn sharers(
    model: &ModelStates,
    ranks: &[RankOptimizer],
    group: usize,
) -> Result<Vec<Vec<usize>>, CheckpointError> {
    let world = ranks.len();
    let counts = ranks.first().and_then(|rank| rank.partitions.as_ref());
    let count = counts.and_then(|counts| counts.get(group).or(counts.first()).copied());
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(world);
    if count == 0 || !world.is_multiple_of(count) {
        return Err(bad(format!(
            "group {group} has {count} partitions, and there are {world} ranks"
        )));
    }
    let parallel = world / count;
    // The order of the meshes of data and experts.
    let data_first = model.config.get("use_data_before_expert_parallelism");
    let data_first = data_first.and_then(Value::as_bool).unwrap_or(false);
    let of = |expert: usize| match data_first {
        true => (expert * count..(expert + 1) * count).collect(),
        false => (expert..world).step_by(parallel).collect(),
    };
    Ok((0..parallel).map(of).collect())
}

fn of_groups(
    model: &ModelStates,
    shapes: &[Shapes],
    ranks: &[RankOptimizer],
    files: &[RankFile],
) -> Result<Masters, CheckpointError> {
    let mut found = Masters::default();
    for rank in ranks {
        if rank.weights.len() != shapes.len() {
            let (has, said) = (rank.weights.len(), shapes.len());
            let problem = format!("it has {has} groups, and {:?} says {said}", model.name);
            return Err(bad_file(&rank.name, problem));
        }
    }
    for (group, shapes) in shapes.iter().enumerate() {
        let mut names = Vec::new();
        let sharers = sharers(model, ranks, group)?;
        for (expert, of) in sharers.iter().enumerate() {
            let of: Vec<&RankOptimizer> = of.iter().filter_map(|rank| ranks.get(*rank)).collect();
            let rename = match sharers.len() {
                0 | 1 => None,
                _ => Some(ExpertNames::new(shapes, expert as u64)),
            };
            let buffers = GroupBuffers::new(&of, group as u64, files)?;
            for (name, parameter) in buffers.parameters(shapes)? {
                let name = match &rename {
                    Some(rename) => rename.global(&name).ok_or_else(|| {
                        bad_file(&model.name, format!("{name:?} is among experts and names none"))
                    })?,
                    None => name,
                };
                names.push(Arc::clone(&name));
                if found.parameters.insert(Arc::clone(&name), parameter).is_some() {
                    return Err(bad_file(&model.name, format!("{name:?} is in two groups")));
                }
            }
        }
        found.groups.names.push(names);
    }
    Ok(found)
}

/// The names of experts: those of one rank are counted from 0.
struct ExpertNames {
    before: u64,
}

impl ExpertNames {
    const PREFIX: &str = "deepspeed_experts.";

    fn new(shapes: &Shapes, expert: u64) -> Self {
        let most = shapes.keys().filter_map(|name| Some(Self::split(name)?.1)).max();
        let each = most.map_or(1, |most| most.saturating_add(1));
        Self { before: expert.saturating_mul(each) }
    }

    /// The name up to the number, the number, and the rest.
    fn split(name: &str) -> Option<(&str, u64, &str)> {
        let at = name.find(Self::PREFIX)? + Self::PREFIX.len();
        let (before, rest) = name.split_at(at);
        let (number, rest) = rest.split_once('.')?;
        Some((before, number.parse().ok()?, rest))
    }

    fn global(&self, name: &str) -> Option<Arc<str>> {
        let (before, local, rest) = Self::split(name)?;
        Some(format!("{before}{}.{rest}", self.before.checked_add(local)?).into())
    }
}

/// The buffers of one group: master weights and states, over the ranks that share it.
struct GroupBuffers {
    weights: Flat,
    flats: IndexMap<Arc<str>, Flat>,
    scalars: IndexMap<Arc<str>, (usize, usize)>,
    paddings: Vec<u64>,
    ranks: u64,
    name: String,
}

impl GroupBuffers {
    fn new(
        ranks: &[&RankOptimizer],
        group: u64,
        files: &[RankFile],
    ) -> Result<Self, CheckpointError> {
        let first = ranks.first().ok_or_else(|| bad(format!("no rank has group {group}")))?;
        let mut weights = Vec::new();
        let mut states: IndexMap<Arc<str>, Vec<Segment>> = IndexMap::new();
        let mut scalars = IndexMap::new();
        let none = GroupStates::new();
        let expected = first.states.get(&group).unwrap_or(&none);
        for rank in ranks {
            let segment = |entry: usize| segment(files, rank, entry);
            let entry = rank.weights.get(&group);
            let entry =
                entry.ok_or_else(|| bad_file(&rank.name, format!("group {group} is missing")))?;
            weights.push(segment(*entry)?);
            let own = rank.states.get(&group).unwrap_or(&none);
            if own.len() != expected.len() || own.keys().any(|key| !expected.contains_key(key)) {
                let problem = format!(
                    "the optimizer's state of group {group} is not that of {:?}",
                    first.name
                );
                return Err(bad_file(&rank.name, problem));
            }
            for (key, entry) in own {
                let is_flat = files.get(rank.part).and_then(|file| file.tensor(*entry));
                match is_flat.filter(|tensor| tensor.shape.ndim() > 0) {
                    Some(_) => states.entry(Arc::clone(key)).or_default().push(segment(*entry)?),
                    None => {
                        scalars.entry(Arc::clone(key)).or_insert((rank.part, *entry));
                    }
                }
            }
        }
        let flats = states.into_iter().map(|(key, of)| (key, Flat::new(of))).collect();
        let paddings = first.paddings.get(&group).cloned().unwrap_or_default();
        let name = format!("group {group} of {:?}", first.name);
        Ok(Self {
            weights: Flat::new(weights),
            flats,
            scalars,
            paddings,
            ranks: ranks.len() as u64,
            name,
        })
    }

    /// The parameters of the group, by the offsets that `shapes` say.
    fn parameters(&self, shapes: &Shapes) -> Result<Vec<(Arc<str>, Parameter)>, CheckpointError> {
        /// The elements to which a buffer is aligned for each rank.
        const ALIGNMENT_MAX: u64 = 32;
        let mut found = Vec::with_capacity(shapes.len());
        let mut at = 0_u64;
        for (position, (name, shape)) in shapes.iter().enumerate() {
            let too_few = |what: &str| {
                bad(format!(
                    "{}: {what} ends before {name:?}, which begins at element {at}",
                    self.name
                ))
            };
            let numel = shape.checked_volume().ok_or_else(|| too_few("the buffer"))?;
            let end = at.checked_add(numel).ok_or_else(|| too_few("the buffer"))?;
            let weights =
                self.weights.slice(at..end).ok_or_else(|| too_few("the buffer of weights"))?;
            let mut states = IndexMap::new();
            for (key, flat) in &self.flats {
                let runs = flat
                    .slice(at..end)
                    .ok_or_else(|| too_few(&format!("the buffer of {key:?}")))?;
                states.insert(Arc::clone(key), State::Elements(runs));
            }
            for (key, (part, entry)) in &self.scalars {
                states.insert(Arc::clone(key), State::Entry { part: *part, entry: *entry });
            }
            let weights = State::Elements(weights);
            found.push((Arc::clone(name), Parameter { shape: shape.clone(), weights, states }));
            let padding = self.paddings.get(position).copied().unwrap_or(0);
            at = end.checked_add(padding).ok_or_else(|| too_few("the buffer"))?;
        }
        let slack = self.ranks.saturating_mul(ALIGNMENT_MAX);
        for flat in std::iter::once(&self.weights).chain(self.flats.values()) {
            if flat.len() > at.saturating_add(slack) {
                let (has, name) = (flat.len(), &self.name);
                return Err(bad(format!(
                    "{name}: the parameters have {at} elements, and a buffer {has}"
                )));
            }
        }
        Ok(found)
    }
}

/// The names of all groups of several model-parallel ranks.
pub(crate) fn join_groups(all: &mut Groups, more: Groups) {
    for (group, names) in more.names.into_iter().enumerate() {
        match all.names.get_mut(group) {
            Some(known) => {
                let before: HashSet<Arc<str>> = known.iter().cloned().collect();
                known.extend(names.into_iter().filter(|name| !before.contains(name)));
            }
            None => all.names.push(names),
        }
    }
    if all.settings.is_empty() {
        all.settings = more.settings;
    }
}
