//! Checks that a plan stores all that ranks hold, and no element twice.
//!
//! A rank records what it holds and does not offer, which is mostly nothing. The coordinator then
//! checks each tensor of the index once: disjoint chunks with as many elements as their tensor
//! store all of it. Only for the others does it look up every offer.
//!
//! The argument: where the chunks of a tensor are inside of it, disjoint, and have its number of elements
//! together, they are a partition of it, and whatever any rank holds of it is stored. That takes no
//! look at the ranks, so it costs the chunks of the index and not the offers of all ranks, which replicas
//! multiply. Tensors of one shape with the same chunks are one check. A tensor that is stored in part,
//! which is sound where one process saves a shard alone, needs the look-up of each offer: by equality of
//! its box first, and by the volume of its intersections with all chunks otherwise, which is exact because
//! these are disjoint. [`MAX_PAIRS`] bounds that second way; beyond it the plan is refused.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::error::{ChunksProblem, PlanError, PlannerProblem};
use crate::plans::metadata::{ChunkTable, Entry, TensorEntry};
use crate::plans::plan::{GlobalPlan, LeafKind, SavePlan, StateIndex, Unoffered};
use crate::tensors::dims::{Dims, checked_volume};
use crate::tensors::overlap::find_overlap;
use crate::tensors::region::Region;

/// The number of pairs of boxes to compare directly, where chunks are not divided as they were
/// offered.
const MAX_PAIRS: usize = 1 << 24;

type Row<'a> = (&'a [u64], &'a [u64]);

/// Finds the regions and objects that `state` holds and `plan` does not offer.
pub(super) fn unoffered(plan: &SavePlan, state: &StateIndex) -> Vec<Unoffered> {
    let mut offers: HashMap<&str, Vec<Row<'_>>> = HashMap::with_capacity(plan.keys().len());
    for key in plan.keys() {
        offers.entry(&key.fqn).or_default();
    }
    for item in plan.items() {
        offers.entry(&item.key.fqn).or_default().push((item.offsets, item.sizes));
    }
    let mut left = Vec::new();
    for leaf in &state.leaves {
        let offered = offers.get(&*leaf.fqn);
        let mut note = |region| left.push(Unoffered { fqn: Arc::clone(&leaf.fqn), region });
        match &leaf.kind {
            LeafKind::Tensor { shape, regions, .. } => {
                if offered.is_none() && shape.contains(&0) {
                    note(None);
                }
                let offered = offered.map_or(&[][..], Vec::as_slice);
                for region in regions.iter().filter(|region| !region.is_empty()) {
                    if !is_offered(region, offered) {
                        note(Some(region.clone()));
                    }
                }
            }
            LeafKind::Object { .. } if offered.is_none_or(Vec::is_empty) => note(None),
            LeafKind::Object { .. } => {}
        }
    }
    left
}

/// Whether `rows` contain the region, whole or in pieces.
fn is_offered(region: &Region, rows: &[Row<'_>]) -> bool {
    let whole = (&**region.offsets(), &**region.sizes());
    if rows.contains(&whole) {
        return true;
    }
    let inside = |row: &Row<'_>| Region::new(row.0, row.1).is_ok_and(|row| region.contains(&row));
    let pieces: Vec<Row<'_>> = rows.iter().copied().filter(inside).collect();
    volume(&pieces) == u128::from(region.volume()) && find_overlap(&pieces) == Ok(None)
}

fn volume(rows: &[Row<'_>]) -> u128 {
    rows.iter().map(|row| u128::from(checked_volume(row.1).unwrap_or(u64::MAX))).sum()
}

/// See [`GlobalPlan::check_against`].
pub(super) fn check(
    plan: &GlobalPlan,
    locals: &[SavePlan],
    planner: &str,
) -> Result<(), PlanError> {
    let mut stored = Vec::with_capacity(plan.metadata.len());
    // Tensors of one shape mostly are divided alike.
    let mut whole: HashMap<&Dims, &ChunkTable> = HashMap::new();
    for (fqn, entry) in plan.metadata.iter() {
        let Entry::Tensor(tensor) = entry else {
            stored.push(Stored::Whole);
            continue;
        };
        let before = whole.get(&tensor.shape);
        if before.is_some_and(|before| before.has_regions_of(&tensor.chunks)) {
            stored.push(Stored::Whole);
            continue;
        }
        let rows = rows(&tensor.chunks);
        match find_overlap(&rows) {
            Ok(None) => {}
            Ok(Some((first, second))) => {
                return Err(PlanError::Planner {
                    planner: planner.to_owned(),
                    fqn: fqn.to_string(),
                    problem: PlannerProblem::Repeated {
                        first: shown(rows[first.min(second)]),
                        second: shown(rows[first.max(second)]),
                    },
                });
            }
            Err(_) => return Err(ChunksProblem::TooIrregular.of(fqn.to_string())),
        }
        let expected = tensor.shape.checked_volume().map(u128::from);
        stored.push(match volume(&rows) {
            found if Some(found) == expected && all_inside(tensor) => {
                whole.insert(&tensor.shape, &tensor.chunks);
                Stored::Whole
            }
            found if locals.len() > 1 => {
                let expected = expected.unwrap_or(u128::MAX);
                return Err(PlanError::Planner {
                    planner: planner.to_owned(),
                    fqn: fqn.to_string(),
                    problem: PlannerProblem::Lost {
                        part: format!("{} of {expected} elements", expected.saturating_sub(found)),
                        holder: "the group".into(),
                    },
                });
            }
            _ => Stored::Part { exact: rows.iter().copied().collect(), rows },
        });
    }
    let all_whole = stored.iter().all(|stored| matches!(stored, Stored::Whole));
    let mut lookup = Lookup { plan, stored, all_whole, planner, pairs: MAX_PAIRS };
    let mut names = Names::default();
    let mut before: Option<&SavePlan> = None;
    // What is stored of a plan is stored of the same plan of other ranks.
    for ranks in SavePlan::group_shared(locals) {
        let first = ranks.first().and_then(|rank| Some((*rank, locals.get(*rank)?)));
        let Some((rank, local)) = first else { continue };
        let same_keys = before.is_some_and(|before| before.shares_keys_with(local));
        lookup.rank(rank, local, same_keys, &mut names)?;
        before = Some(local);
    }
    Ok(())
}

fn rows(chunks: &ChunkTable) -> Vec<Row<'_>> {
    chunks.iter().map(|chunk| (chunk.offsets, chunk.sizes)).collect()
}

fn all_inside(tensor: &TensorEntry) -> bool {
    let inside = |((offset, size), len): ((&u64, &u64), &u64)| {
        offset.checked_add(*size).is_some_and(|end| end <= *len)
    };
    let mut chunks = tensor.chunks.iter();
    chunks.all(|chunk| chunk.offsets.iter().zip(chunk.sizes).zip(&*tensor.shape).all(inside))
}

fn shown(row: Row<'_>) -> String {
    Region::new(row.0, row.1).map_or_else(|error| error.to_string(), |region| region.to_string())
}

enum Stored<'a> {
    Whole,
    Part { exact: HashSet<Row<'a>>, rows: Vec<Row<'a>> },
}

/// The positions of a rank's names in the index.
#[derive(Default)]
struct Names {
    ids: Vec<Option<usize>>,
    all_known: bool,
}

/// Looks up in the index the parts that ranks hold.
struct Lookup<'a> {
    plan: &'a GlobalPlan,
    stored: Vec<Stored<'a>>,
    all_whole: bool,
    planner: &'a str,
    pairs: usize,
}

impl<'a> Lookup<'a> {
    /// `names` are those of the previous rank; most ranks have the same names in the same order, or
    /// with `same_keys` one table of them.
    fn rank(
        &mut self,
        rank: usize,
        local: &'a SavePlan,
        same_keys: bool,
        names: &mut Names,
    ) -> Result<(), PlanError> {
        let metadata = &self.plan.metadata;
        let Names { ids, all_known } = names;
        ids.truncate(local.keys().len());
        let keys = if same_keys { &[] } else { local.keys() };
        for (position, key) in keys.iter().enumerate() {
            let guess = ids.get(position).copied().flatten();
            let same = |id: &usize| metadata.at(*id).is_some_and(|(fqn, _)| *fqn == key.fqn);
            let id = guess.filter(same).or_else(|| metadata.index_of(&key.fqn));
            let without_elements = key.tensor.as_ref().is_some_and(|spec| spec.shape.contains(&0));
            if id.is_none() && without_elements {
                self.lost(rank, &key.fqn, None)?;
            }
            match ids.get_mut(position) {
                Some(slot) => *slot = id,
                None => ids.push(id),
            }
        }
        if !same_keys {
            *all_known = ids.iter().all(Option::is_some);
        }
        // Items of tensors that are stored whole need no look-up.
        let all_there = self.all_whole && *all_known;
        for item in local.items().take(if all_there { 0 } else { usize::MAX }) {
            let row = (item.offsets, item.sizes);
            let id = ids.get(item.key_index).copied().flatten();
            if !item.sizes.contains(&0) && !self.has(id, row) {
                self.lost(rank, &item.key.fqn, item.is_tensor().then_some(row))?;
            }
        }
        for left in local.unoffered() {
            let row = left.region.as_ref().map(|region| (&**region.offsets(), &**region.sizes()));
            let id = metadata.index_of(&left.fqn);
            if !row.map_or(id.is_some(), |row| self.has(id, row)) {
                self.lost(rank, &left.fqn, row)?;
            }
        }
        Ok(())
    }

    /// Whether the entry's disjoint chunks contain all elements of the row.
    fn has(&mut self, id: Option<usize>, row: Row<'_>) -> bool {
        let Some(stored) = id.and_then(|id| self.stored.get(id)) else { return false };
        let Stored::Part { exact, rows } = stored else { return true };
        if exact.contains(&row) {
            return true;
        }
        let Some(left) = self.pairs.checked_sub(rows.len()) else { return false };
        self.pairs = left;
        let Ok(wanted) = Region::new(row.0, row.1) else { return false };
        let shared = rows.iter().filter_map(|row| {
            let chunk = Region::new(row.0, row.1).ok()?;
            (chunk.ndim() == wanted.ndim()).then(|| chunk.intersect(&wanted))?
        });
        shared.map(|region| u128::from(region.volume())).sum::<u128>()
            == u128::from(wanted.volume())
    }

    fn lost(&self, rank: usize, fqn: &str, row: Option<Row<'_>>) -> Result<(), PlanError> {
        if self.plan.left_out.contains(fqn) && self.plan.metadata.get(fqn).is_none() {
            return Ok(());
        }
        Err(PlanError::Planner {
            planner: self.planner.to_owned(),
            fqn: fqn.to_owned(),
            problem: PlannerProblem::Lost {
                part: row.map_or_else(|| "all".into(), shown),
                holder: format!("rank {rank}"),
            },
        })
    }
}
