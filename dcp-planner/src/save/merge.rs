//! All ranks' offers as one table of distinct chunks and who has them.
//!
//! Names are interned once, rows are grouped by name and sorted by place. Ranks mostly list the
//! same names in the same order, so most names are found without hashing.

use std::collections::HashMap;
use std::sync::Arc;

use dcp_core::{
    CheckpointMetadata, ChunkRef, Entry, GlobalPlan, ObjectEntry, PlanError, PlanKey, Rank,
    SavePlan, SelectedItem, StatePath, TensorEntry, TensorSpec, WriteItem,
};

use crate::validate::{check_chunks, shown, unsupported};

const NONE: u32 = u32::MAX;

/// An item of a rank's offer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    pub(super) rank: u32,
    pub(super) item: u32,
}

/// A distinct chunk or object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub(super) key: u32,
    /// Its owners, lowest rank first: a range of [`Merged::owners`].
    first_owner: u32,
    end_owner: u32,
    pub(super) byte_len: u64,
}

pub(super) struct Merged<'a> {
    pub(super) locals: &'a [SavePlan],
    /// For each rank, the number of all items of the ranks before it.
    pub(super) bases: Vec<usize>,
    pub(super) keys: Vec<MergedKey<'a>>,
    pub(super) owners: Vec<Origin>,
    pub(super) chunks: Vec<Chunk>,
}

pub(super) struct MergedKey<'a> {
    fqn: &'a Arc<str>,
    path: Option<&'a StatePath>,
    pub(super) spec: Option<&'a TensorSpec>,
    /// The rank whose description this is.
    rank: Rank,
    /// The last rank that listed the name.
    last_rank: Rank,
    contradicted: bool,
    items: u32,
}

/// Merges offers, given in rank order.
pub(super) fn merge(locals: &[SavePlan]) -> Result<Merged<'_>, PlanError> {
    let mut bases = Vec::with_capacity(locals.len());
    let mut total = 0_usize;
    for local in locals {
        bases.push(total);
        total += local.len();
    }
    if u32::try_from(total).is_err() || u32::try_from(locals.len()).is_err() {
        return Err(unsupported("", "more than 2^32 items in one save"));
    }
    let (mut keys, ids) = intern(locals)?;
    let rows = group_by_key(locals, &mut keys, &ids, total)?;
    let mut merged =
        Merged { locals, bases, keys, owners: Vec::with_capacity(total), chunks: Vec::new() };
    let mut errors = Vec::new();
    let mut sorted = Vec::new();
    let mut start = 0_usize;
    for key in 0..merged.keys.len() {
        let end = start + merged.keys[key].items as usize;
        sorted.clear();
        sorted.extend(rows[start..end].iter().filter_map(|origin| {
            let item = locals[origin.rank as usize].item(origin.item as usize)?;
            Some((item, *origin))
        }));
        // A stable sort keeps the ranks of each place in order, and takes linear time for the
        // usual layouts, which are sorted already.
        sorted.sort_by(|(a, _), (b, _)| a.offsets.cmp(b.offsets));
        for place in sorted.chunk_by(|(a, _), (b, _)| a.offsets == b.offsets) {
            if let Err(error) = merged.add_place(key, place) {
                errors.push(error);
                break;
            }
        }
        start = end;
    }
    none_of(errors)?;
    Ok(merged)
}

/// One error, or several as one.
fn none_of(mut errors: Vec<PlanError>) -> Result<(), PlanError> {
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.remove(0)),
        _ => Err(PlanError::Many(errors)),
    }
}

type Ids = Vec<Vec<u32>>;

/// Gives every name a number, in the order of first appearance.
fn intern(locals: &[SavePlan]) -> Result<(Vec<MergedKey<'_>>, Ids), PlanError> {
    let mut numbers: HashMap<&str, u32> = HashMap::new();
    let mut errors = Vec::new();
    let mut keys: Vec<MergedKey<'_>> = Vec::new();
    let mut ids: Ids = Vec::with_capacity(locals.len());
    for (rank, local) in locals.iter().enumerate() {
        let rank = rank as Rank;
        let mut mine = Vec::with_capacity(local.keys().len());
        for (position, key) in local.keys().iter().enumerate() {
            let before = ids.last().and_then(|ids| ids.get(position)).copied();
            let guess = before.filter(|id| *keys[*id as usize].fqn == key.fqn);
            let id = match guess.or_else(|| numbers.get(&*key.fqn).copied()) {
                Some(id) => {
                    let known = &mut keys[id as usize];
                    if known.last_rank == rank {
                        return Err(PlanError::DuplicateFqn { fqn: key.fqn.to_string() });
                    }
                    known.last_rank = rank;
                    known.path = known.path.or(key.path.as_ref());
                    if known.spec != key.tensor.as_ref() && !known.contradicted {
                        known.contradicted = true;
                        errors.push(disagreement(known, key, rank));
                    }
                    id
                }
                None => {
                    let id = u32::try_from(keys.len())
                        .ok()
                        .filter(|id| *id != NONE)
                        .ok_or_else(|| unsupported(&key.fqn, "too many names"))?;
                    numbers.insert(&key.fqn, id);
                    keys.push(MergedKey {
                        fqn: &key.fqn,
                        path: key.path.as_ref(),
                        spec: key.tensor.as_ref(),
                        rank,
                        last_rank: rank,
                        contradicted: false,
                        items: 0,
                    });
                    id
                }
            };
            mine.push(id);
        }
        ids.push(mine);
    }
    none_of(errors)?;
    Ok((keys, ids))
}

/// All items, sorted by key and then by rank; counts the items of each key.
fn group_by_key(
    locals: &[SavePlan],
    keys: &mut [MergedKey<'_>],
    ids: &Ids,
    total: usize,
) -> Result<Vec<Origin>, PlanError> {
    let ids_of = |rank: usize| {
        let (local, ids) = (&locals[rank], &ids[rank]);
        (0..local.len()).map(move |index| {
            let id = local.item(index).and_then(|item| ids.get(item.key_index)).copied();
            id.ok_or_else(|| unsupported("", "an item has more than 2^64 bytes"))
        })
    };
    for rank in 0..locals.len() {
        for id in ids_of(rank) {
            keys[id? as usize].items += 1;
        }
    }
    let mut next = Vec::with_capacity(keys.len());
    let mut start = 0_usize;
    for key in &*keys {
        next.push(start);
        start += key.items as usize;
    }
    let mut rows = vec![Origin { rank: 0, item: 0 }; total];
    for rank in 0..locals.len() {
        for (item, id) in ids_of(rank).enumerate() {
            let slot = &mut next[id? as usize];
            rows[*slot] = Origin { rank: rank as u32, item: item as u32 };
            *slot += 1;
        }
    }
    Ok(rows)
}

impl<'a> Merged<'a> {
    /// The ranks that have a chunk, lowest first; at least one.
    pub(super) fn owners_of(&self, chunk: &Chunk) -> &[Origin] {
        &self.owners[chunk.first_owner as usize..chunk.end_owner as usize]
    }

    /// Items in the order of all ranks, each with the chunk that `origins` assigns to it, one
    /// item per chunk.
    pub(super) fn in_order(&self, origins: impl Iterator<Item = Origin>) -> Vec<u32> {
        let total = self.bases.last().zip(self.locals.last()).map_or(0, |(b, l)| b + l.len());
        let mut slots = vec![NONE; total];
        for (chunk, origin) in origins.enumerate() {
            slots[self.bases[origin.rank as usize] + origin.item as usize] = chunk as u32;
        }
        slots
    }

    fn item(&self, origin: Origin) -> Option<WriteItem<'a>> {
        self.locals[origin.rank as usize].item(origin.item as usize)
    }

    /// Adds what all ranks have at one place of a key.
    fn add_place(
        &mut self,
        key: usize,
        place: &[(WriteItem<'a>, Origin)],
    ) -> Result<(), PlanError> {
        let holds_elements = |item: &WriteItem<'_>| !item.sizes.contains(&0);
        let lead = place.iter().find(|(item, _)| holds_elements(item)).or(place.first());
        let Some((lead, lead_origin)) = lead else { return Ok(()) };
        let first_owner = self.owners.len() as u32;
        let mut last_rank = None;
        for (item, origin) in place {
            if item.sizes == lead.sizes {
                if last_rank != Some(origin.rank) {
                    self.owners.push(*origin);
                    last_rank = Some(origin.rank);
                }
            } else if holds_elements(item) {
                let words = |item: &WriteItem<'_>| {
                    shown(ChunkRef { offsets: item.offsets, sizes: item.sizes, placement: None })
                };
                return Err(PlanError::Disagreement {
                    fqn: lead.key.fqn.to_string(),
                    left: words(lead),
                    left_rank: lead_origin.rank,
                    right: words(item),
                    right_rank: origin.rank,
                });
            }
        }
        let end_owner = self.owners.len() as u32;
        let byte_len = lead.byte_len;
        self.chunks.push(Chunk { key: key as u32, first_owner, end_owner, byte_len });
        Ok(())
    }

    /// The plan in which `writers` write the chunks, one each.
    pub(super) fn into_plan(
        self,
        writers: &[Origin],
        validate: bool,
    ) -> Result<GlobalPlan, PlanError> {
        let slots = self.in_order(writers.iter().copied());
        let mut entries: Vec<(usize, Entry)> = Vec::with_capacity(self.keys.len());
        let mut entry_of = vec![NONE; self.keys.len()];
        let mut selections = Vec::with_capacity(self.locals.len());
        let mut chunk_ranks: Vec<Vec<Rank>> = Vec::with_capacity(self.keys.len());
        for (rank, local) in self.locals.iter().enumerate() {
            let base = self.bases[rank];
            let mine = &slots[base..base + local.len()];
            let mut selected = Vec::new();
            for (item, chunk) in mine.iter().enumerate().filter(|(_, chunk)| **chunk != NONE) {
                let key = self.chunks[*chunk as usize].key as usize;
                if entry_of[key] == NONE {
                    entry_of[key] = entries.len() as u32;
                    entries.push((key, self.entry(key)));
                    chunk_ranks.push(Vec::new());
                }
                let entry = entry_of[key];
                let origin = Origin { rank: rank as u32, item: item as u32 };
                let mut position = 0;
                if let (Entry::Tensor(tensor), Some(item)) =
                    (&mut entries[entry as usize].1, self.item(origin))
                {
                    position = tensor
                        .chunks
                        .push(item.offsets, item.sizes, None)
                        .map_err(|error| unsupported(self.keys[key].fqn, &error.to_string()))?;
                    chunk_ranks[entry as usize].push(rank as Rank);
                }
                selected.push(SelectedItem { item: origin.item, entry, chunk: position as u32 });
            }
            selections.push(selected);
        }
        let several = self.locals.len() > 1;
        for key in (0..self.keys.len()).filter(|key| entry_of[*key] == NONE) {
            // A tensor without elements stays in the checkpoint although nobody holds a chunk.
            let elements = self.keys[key].spec.map_or(0, |s| s.shape.checked_volume().unwrap_or(1));
            if self.keys[key].spec.is_some() && (elements == 0 || (several && validate)) {
                entries.push((key, self.entry(key)));
                chunk_ranks.push(Vec::new());
            }
        }
        let mut errors = Vec::new();
        let mut metadata = CheckpointMetadata::new();
        for ((key, entry), ranks) in entries.into_iter().zip(chunk_ranks) {
            let fqn = self.keys[key].fqn;
            if let (true, Entry::Tensor(tensor)) = (validate, &entry) {
                let rank = |chunk: usize| ranks.get(chunk).copied();
                check_chunks(fqn, &tensor.shape, &tensor.chunks, several, rank, &mut errors);
            }
            metadata.insert(Arc::clone(fqn), entry);
        }
        none_of(errors)?;
        Ok(GlobalPlan { metadata, selections })
    }

    fn entry(&self, key: usize) -> Entry {
        let key = &self.keys[key];
        match key.spec {
            Some(spec) => {
                let mut tensor = TensorEntry::new(spec.dtype, spec.shape.clone());
                tensor.path = key.path.cloned();
                Entry::Tensor(tensor)
            }
            None => {
                let mut object = ObjectEntry::new(None);
                object.path = key.path.cloned();
                Entry::Object(object)
            }
        }
    }
}

fn disagreement(known: &MergedKey<'_>, other: &PlanKey, rank: Rank) -> PlanError {
    let words = |spec: Option<&TensorSpec>| match spec {
        None => "an object".to_owned(),
        Some(TensorSpec { dtype, shape, sharded }) => {
            let kind = if *sharded { "sharded" } else { "replicated" };
            format!("a {kind} {dtype} tensor of shape {shape}")
        }
    };
    PlanError::Disagreement {
        fqn: known.fqn.to_string(),
        left: words(known.spec),
        left_rank: known.rank,
        right: words(other.tensor.as_ref()),
        right_rank: rank,
    }
}
