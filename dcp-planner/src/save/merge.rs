//! All ranks' offers as one table of distinct chunks and the ranks that have them.
//!
//! With thousands of ranks the offers are far larger than any cache, so they are gone through
//! once, offer by offer, and copied apart by name; everything else works on one name at a time.
//! Ranks mostly list the same names in the same order, so most names are found without hashing.
//! Replicas whose plans share their memory are one offer, which is gone through once for all of them.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use dcp_core::dims::checked_volume;
use dcp_core::error::{PlanSubject, RanksProblem, StateProblem};
use dcp_core::metadata::ChunkRef;
use dcp_core::path::StatePath;
use dcp_core::plan::{PlanKey, SavePlan, TensorSpec, WriteItem};
use dcp_core::{Dims, PlanError, Rank};

use crate::validate::shown;

/// An item of an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) offer: u32,
    pub(super) item: u32,
}

/// A plan, and the ranks that have it.
pub(super) struct Offer {
    pub(super) lowest: Rank,
    /// All others, ascending.
    pub(super) others: Box<[Rank]>,
    /// The number of items.
    pub(super) len: usize,
}

/// All offers, by name.
pub(super) struct Merged<'a> {
    pub(super) world_size: usize,
    /// In the order of their lowest ranks.
    pub(super) offers: Vec<Offer>,
    /// The name of every item, offer by offer.
    pub(super) item_keys: Vec<u32>,
    /// The names, in the order of first appearance.
    pub(super) keys: Vec<MergedKey<'a>>,
}

/// A name and all that is offered under it: rows in the order of offers and their items.
pub(super) struct MergedKey<'a> {
    pub(super) fqn: &'a Arc<str>,
    /// The path on the lowest rank that has one.
    pub(super) path: Option<&'a StatePath>,
    /// The tensor as the lowest rank describes it; `None` for an object.
    pub(super) spec: Option<&'a TensorSpec>,
    rank: Rank,
    last_rank: Rank,
    contradicted: bool,
    /// Offsets and sizes of each row; the number of bytes for an object.
    numbers: Vec<u64>,
    origins: Vec<Origin>,
    division: Rc<Division>,
}

/// The chunks of a tensor and their owners. Tensors that are divided alike have one.
#[derive(Default)]
struct Division {
    /// Distinct chunks, by place.
    chunks: Vec<Chunk>,
    /// Rows of the owners of the chunks.
    owners: Vec<u32>,
}

/// A distinct chunk or object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    first_owner: u32,
    end_owner: u32,
    pub(super) byte_len: u64,
}

fn too_large(what: &str, limit: u64) -> PlanError {
    PlanError::TooLarge { what: what.to_owned(), limit }
}

/// The offers of plans, given in rank order, each with its plan.
fn offers(locals: &[SavePlan]) -> Result<Vec<(Offer, &SavePlan)>, PlanError> {
    if Rank::try_from(locals.len()).is_err() {
        return Err(too_large("the number of ranks", Rank::MAX.into()));
    }
    let offer = |positions: Vec<usize>| {
        // Positions are less than the number of ranks, which fits.
        let mut ranks = positions.into_iter().map(|position| position as Rank);
        let lowest = ranks.next()?;
        let plan = locals.get(lowest as usize)?;
        Some((Offer { lowest, others: ranks.collect(), len: plan.len() }, plan))
    };
    Ok(SavePlan::group_shared(locals).into_iter().filter_map(offer).collect())
}

/// Merges plans, given in rank order.
pub(super) fn merge(locals: &[SavePlan]) -> Result<Merged<'_>, PlanError> {
    let (offers, plans): (Vec<Offer>, Vec<&SavePlan>) = offers(locals)?.into_iter().unzip();
    let total = offers.iter().try_fold(0_usize, |sum, offer| sum.checked_add(offer.len));
    let Some(total) = total.filter(|total| u32::try_from(*total).is_ok()) else {
        return Err(too_large("the number of different items in one save", u32::MAX.into()));
    };
    let mut merged = Merged {
        world_size: locals.len(),
        offers,
        item_keys: Vec::with_capacity(total),
        keys: Vec::new(),
    };
    let mut errors = Vec::new();
    let mut numbers = HashMap::new();
    let mut ids = Vec::new();
    let mut before: Option<&SavePlan> = None;
    for (offer, plan) in (0..).zip(plans) {
        // The numbers of the same table of keys are the same.
        if !before.is_some_and(|before| before.shares_keys_with(plan)) {
            let rank = lowest_rank(&merged.offers, offer);
            merged.intern(rank, plan, &mut ids, &mut numbers, &mut errors)?;
        }
        before = Some(plan);
        for item in 0..plan.len() {
            let found = plan.item(item);
            let found = found.and_then(|found| Some((*ids.get(found.key_index)?, found)));
            let Some((id, found)) = found else {
                return Err(too_large("the length of an item in bytes", u64::MAX));
            };
            merged.item_keys.push(id);
            // Fewer than the total, which fits.
            merged.keys[id as usize].push(&found, Origin { offer, item: item as u32 });
        }
    }
    // Rows of contradictory descriptions cannot be compared.
    none_of(std::mem::take(&mut errors))?;
    // The last tensor of each shape: most are divided as it is.
    let mut before: HashMap<&Dims, usize> = HashMap::new();
    for at in 0..merged.keys.len() {
        let (found, rest) = merged.keys.split_at_mut(at);
        let Some(key) = rest.first_mut() else { break };
        let before = key.spec.and_then(|spec| before.insert(&spec.shape, at));
        match before.and_then(|before| found.get(before)) {
            Some(before) if key.is_divided_like(before) => {
                key.division = Rc::clone(&before.division);
            }
            _ => match key.divide(&merged.offers) {
                Ok(division) => key.division = Rc::new(division),
                Err(error) => errors.push(error),
            },
        }
    }
    none_of(errors)?;
    Ok(merged)
}

/// One error, or several as one.
pub(super) fn none_of(mut errors: Vec<PlanError>) -> Result<(), PlanError> {
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.remove(0)),
        _ => Err(PlanError::Many(errors)),
    }
}

impl<'a> Merged<'a> {
    /// The offer that the item in a row of a name is from.
    pub(super) fn offer(&self, key: &MergedKey<'_>, row: u32) -> &Offer {
        &self.offers[key.origin(row).offer as usize]
    }

    /// Makes `ids` the numbers of a rank's names; before, they are those of the rank before it.
    fn intern(
        &mut self,
        rank: Rank,
        local: &'a SavePlan,
        ids: &mut Vec<u32>,
        numbers: &mut HashMap<&'a str, u32>,
        errors: &mut Vec<PlanError>,
    ) -> Result<(), PlanError> {
        ids.truncate(local.keys().len());
        for (position, key) in local.keys().iter().enumerate() {
            let guess = ids.get(position).copied();
            let guess = guess.filter(|id| *self.keys[*id as usize].fqn == key.fqn);
            let known = guess.or_else(|| numbers.get(&*key.fqn).copied());
            let id = match known {
                Some(id) => id,
                None => {
                    let id = u32::try_from(self.keys.len())
                        .map_err(|_| too_large("the number of names", u32::MAX.into()))?;
                    numbers.insert(&key.fqn, id);
                    self.keys.push(MergedKey::new(key, rank));
                    id
                }
            };
            if known.is_some() {
                self.keys[id as usize].meet(key, rank, errors)?;
            }
            match ids.get_mut(position) {
                Some(slot) => *slot = id,
                None => ids.push(id),
            }
        }
        Ok(())
    }
}

impl<'a> MergedKey<'a> {
    fn new(key: &'a PlanKey, rank: Rank) -> Self {
        Self {
            fqn: &key.fqn,
            path: key.path.as_ref(),
            spec: key.tensor.as_ref(),
            rank,
            last_rank: rank,
            contradicted: false,
            numbers: Vec::new(),
            origins: Vec::new(),
            division: Rc::default(),
        }
    }

    /// Takes in the description of another rank.
    fn meet(
        &mut self,
        key: &'a PlanKey,
        rank: Rank,
        errors: &mut Vec<PlanError>,
    ) -> Result<(), PlanError> {
        if self.last_rank == rank {
            return Err(StateProblem::Duplicate.of(key.fqn.to_string()));
        }
        self.last_rank = rank;
        self.path = self.path.or(key.path.as_ref());
        if self.spec != key.tensor.as_ref() && !self.contradicted {
            self.contradicted = true;
            errors.push(PlanError::Ranks(RanksProblem::Disagreement {
                subject: PlanSubject::Entry(key.fqn.to_string()),
                left: described(self.spec),
                left_rank: self.rank,
                right: described(key.tensor.as_ref()),
                right_rank: rank,
            }));
        }
        Ok(())
    }

    fn push(&mut self, item: &WriteItem<'_>, origin: Origin) {
        self.origins.push(origin);
        if item.is_tensor() {
            self.numbers.extend_from_slice(item.offsets);
            self.numbers.extend_from_slice(item.sizes);
        } else {
            self.numbers.push(item.byte_len);
        }
    }

    fn ndim(&self) -> usize {
        self.spec.map_or(0, |spec| spec.shape.ndim())
    }

    /// Offsets and sizes of a row; empty for an object.
    pub(super) fn row(&self, row: u32) -> (&[u64], &[u64]) {
        let ndim = self.ndim();
        let start = row as usize * 2 * ndim;
        let (offsets, sizes) = self.numbers[start..start + 2 * ndim].split_at(ndim);
        (offsets, sizes)
    }

    /// The offer and the number of the item in a row.
    pub(super) fn origin(&self, row: u32) -> Origin {
        self.origins[row as usize]
    }

    fn byte_len(&self, row: u32) -> u64 {
        match self.spec {
            None => self.numbers[row as usize],
            Some(spec) => {
                let volume = checked_volume(self.row(row).1).unwrap_or(0);
                volume.saturating_mul(spec.dtype.size() as u64)
            }
        }
    }

    /// Distinct chunks, by place.
    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.division.chunks
    }

    /// The rows of the offers that have a chunk, first offer first; at least one.
    pub(super) fn owners_of(&self, chunk: &Chunk) -> &[u32] {
        &self.division.owners[chunk.first_owner as usize..chunk.end_owner as usize]
    }

    /// Whether the rows are the same parts of a tensor of the same dtype and shape, of the same offers.
    fn is_divided_like(&self, other: &Self) -> bool {
        let is_of_one_offer = |(mine, other): (&Origin, &Origin)| mine.offer == other.offer;
        self.spec == other.spec
            && self.numbers == other.numbers
            && self.origins.len() == other.origins.len()
            && self.origins.iter().zip(&other.origins).all(is_of_one_offer)
    }

    fn divide(&self, offers: &[Offer]) -> Result<Division, PlanError> {
        let mut rows: Vec<u32> = (0..self.origins.len() as u32).collect();
        // Stable, so that the offers at each place stay in order; and linear for the usual
        // layouts, which are sorted already.
        rows.sort_by(|a, b| self.row(*a).0.cmp(self.row(*b).0));
        let mut division = Division::default();
        division.owners.reserve(rows.len());
        for place in rows.chunk_by(|a, b| self.row(*a).0 == self.row(*b).0) {
            let chunk = self.find_chunk(place, &mut division.owners, offers)?;
            division.chunks.extend(chunk);
        }
        Ok(division)
    }

    /// The one chunk that begins at a place.
    fn find_chunk(
        &self,
        place: &[u32],
        owners: &mut Vec<u32>,
        offers: &[Offer],
    ) -> Result<Option<Chunk>, PlanError> {
        let holds_elements = |row: &&u32| !self.row(**row).1.contains(&0);
        // Of empty chunks the one of the smallest sizes, so that the order of ranks is irrelevant.
        let emptiest = || place.iter().min_by_key(|row| self.row(**row).1);
        let Some(&lead) = place.iter().find(holds_elements).or_else(emptiest) else {
            return Ok(None);
        };
        let first_owner = owners.len() as u32;
        let mut last_offer = None;
        for row in place {
            if self.row(*row).1 == self.row(lead).1 {
                let offer = self.origin(*row).offer;
                if last_offer != Some(offer) {
                    owners.push(*row);
                    last_offer = Some(offer);
                }
            } else if holds_elements(&row) {
                let words = |row: u32| {
                    let (offsets, sizes) = self.row(row);
                    shown(ChunkRef { offsets, sizes, placement: None })
                };
                return Err(PlanError::Ranks(RanksProblem::Disagreement {
                    subject: PlanSubject::Entry(self.fqn.to_string()),
                    left: words(lead),
                    left_rank: lowest_rank(offers, self.origin(lead).offer),
                    right: words(*row),
                    right_rank: lowest_rank(offers, self.origin(*row).offer),
                }));
            }
        }
        let end_owner = owners.len() as u32;
        Ok(Some(Chunk { first_owner, end_owner, byte_len: self.byte_len(lead) }))
    }
}

fn lowest_rank(offers: &[Offer], offer: u32) -> Rank {
    offers.get(offer as usize).map_or(0, |offer| offer.lowest)
}

fn described(spec: Option<&TensorSpec>) -> String {
    match spec {
        None => "an object".to_owned(),
        Some(TensorSpec { dtype, shape, sharded }) => {
            let kind = if *sharded { "sharded" } else { "replicated" };
            format!("a {kind} {dtype} tensor of shape {shape}")
        }
    }
}
