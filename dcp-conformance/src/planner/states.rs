//! States of whole groups, made from a fixed sequence of numbers.

use std::collections::BTreeMap;

use dcp_core::path::PathItem;
use dcp_core::plan::{LeafKind, StateIndex, StateLeaf};
use dcp_core::{DType, Dims, Region};

use crate::case::{Failure, Outcome, ensure};
use crate::numbers::Numbers;

pub(super) fn region(offsets: &[u64], sizes: &[u64]) -> Result<Region, Failure> {
    Ok(Region::new(offsets, sizes)?)
}

/// Returns the share of an axis of each of `parts`: the quotient rounded up, the last ones less.
pub(super) fn part(len: u64, parts: u64, part: u64) -> (u64, u64) {
    let each = len.div_ceil(parts.max(1));
    let start = (each * part).min(len);
    (start, (start + each).min(len) - start)
}

/// The distribution of a tensor over ranks.
#[derive(Clone, Copy)]
pub(super) enum Spread {
    Replicated,
    Rows,
    Columns,
    /// Rows over pairs of ranks, which replicate each other.
    Pairs,
    /// Two columns of blocks.
    Blocks,
    /// Whole, on the last rank only.
    OneRank,
    /// Two blocks of rows on each rank, as context parallelism deals them: the first and the last.
    Ends,
}

pub(super) const SPREADS: [Spread; 7] = [
    Spread::Replicated,
    Spread::Rows,
    Spread::Columns,
    Spread::Pairs,
    Spread::Blocks,
    Spread::OneRank,
    Spread::Ends,
];

pub(super) fn held(
    spread: Spread,
    shape: &[u64],
    rank: u64,
    world: u64,
) -> Vec<(Vec<u64>, Vec<u64>)> {
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    let mut cut = |axis: usize, parts, at| {
        if let Some(len) = shape.get(axis) {
            (offsets[axis], sizes[axis]) = part(*len, parts, at);
        }
    };
    match spread {
        Spread::Ends => {
            let both = [rank, 2 * world - 1 - rank].map(|at| {
                let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
                if let Some(len) = shape.first() {
                    (offsets[0], sizes[0]) = part(*len, 2 * world, at);
                }
                (offsets, sizes)
            });
            // A tensor without axes has no second block.
            let blocks = if shape.is_empty() { 1 } else { 2 };
            return both.into_iter().take(blocks).collect();
        }
        Spread::Replicated => {}
        Spread::OneRank if rank + 1 < world => return Vec::new(),
        Spread::OneRank => {}
        Spread::Rows => cut(0, world, rank),
        Spread::Columns => cut(shape.len().saturating_sub(1), world, rank),
        Spread::Pairs => cut(0, world.div_ceil(2), rank / 2),
        Spread::Blocks => {
            cut(0, world.div_ceil(2), rank / 2);
            // The last rank of an odd group has no neighbor to share its rows with.
            let halves = if rank + 1 == world && world % 2 == 1 { 1 } else { 2 };
            cut(shape.len().saturating_sub(1).max(1), halves, rank % 2);
        }
    }
    vec![(offsets, sizes)]
}

/// The states of all ranks of some group, and the shapes of the tensors in them.
pub(super) fn states(seed: u64) -> Result<(Vec<StateIndex>, BTreeMap<String, Dims>), Failure> {
    let mut numbers = Numbers(seed);
    let world = 1 + numbers.below(6);
    let mut ranks = vec![StateIndex::default(); usize::try_from(world)?];
    let mut shapes = BTreeMap::new();
    for number in 0..1 + numbers.below(8) {
        let fqn = format!("t.{number}");
        let shape: Dims = (0..numbers.below(4)).map(|_| numbers.below(9)).collect();
        let spread = SPREADS[usize::try_from(numbers.below(SPREADS.len() as u64))?];
        for (rank, state) in ranks.iter_mut().enumerate() {
            let regions = held(spread, &shape, rank as u64, world)
                .iter()
                .map(|(offsets, sizes)| region(offsets, sizes))
                .collect::<Result<_, _>>()?;
            let mut leaf = tensor(&fqn, &shape, !matches!(spread, Spread::Replicated), regions);
            leaf.path = Some([PathItem::Key("t".into()), PathItem::Index(number)].into());
            state.leaves.push(leaf);
        }
        shapes.insert(fqn, shape);
    }
    for number in 0..numbers.below(4) {
        let mut leaf = object(&format!("o.{number}"), 1 + numbers.below(100));
        leaf.path =
            Some([PathItem::Key("o".into()), PathItem::Key(number.to_string().into())].into());
        ranks.iter_mut().for_each(|state| state.leaves.push(leaf.clone()));
    }
    Ok((ranks, shapes))
}

pub(super) fn tensor(fqn: &str, shape: &Dims, sharded: bool, regions: Vec<Region>) -> StateLeaf {
    let kind = LeafKind::Tensor { dtype: DType::Int16, shape: shape.clone(), sharded, regions };
    StateLeaf { fqn: fqn.into(), path: None, kind }
}

pub(super) fn object(fqn: &str, byte_len: u64) -> StateLeaf {
    StateLeaf { fqn: fqn.into(), path: None, kind: LeafKind::Object { byte_len } }
}

pub(super) fn count(counts: &mut [u32], region: &Region, shape: &[u64]) -> Outcome {
    for element in region.runs_in(shape).flat_map(|(at, n)| at..at + n) {
        let slot = counts.get_mut(usize::try_from(element)?);
        ensure!(slot.is_some(), "{region} is outside {shape:?}");
        slot.into_iter().for_each(|slot| *slot += 1);
    }
    Ok(())
}

pub(super) fn zeros(shape: &Dims) -> Result<Vec<u32>, Failure> {
    Ok(vec![0; usize::try_from(shape.checked_volume().unwrap_or(0))?])
}
