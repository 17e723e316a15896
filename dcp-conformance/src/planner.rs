//! The suites for [`SavePlanner`] and [`LoadPlanner`]: laws that hold for every layout.
//!
//! States are made from a fixed sequence of numbers: groups of one to six ranks, tensors by rows,
//! columns and blocks, even and uneven, replicated, empty, without axes, on one rank only, and
//! objects. They are small enough to count every element.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::sync::Arc;

use dcp_core::{
    CheckpointMetadata, DType, Dims, Encoding, Entry, FileId, GlobalPlan, Key, Layout, LeafKind,
    LoadPlan, LoadPlanner, LoadReport, ObjectEntry, Placement, PlanContext, ReadKind, Region,
    SavePlan, SavePlanner, StateIndex, StateLeaf, TensorEntry,
};
use libtest_mimic::Trial;

use crate::case::{CASE_TIMEOUT, Outcome, ensure, report, run_thread};

/// Different states that every clause is tried with.
const STATES: u64 = 60;

/// Runs the suite for save planners as a test binary; see [`save_trials`].
pub fn save_main(name: &str, planner: Arc<dyn SavePlanner>) -> ExitCode {
    crate::run(save_trials(name, planner))
}

/// Runs the suite for load planners as a test binary; see [`load_trials`].
pub fn load_main(name: &str, planner: Arc<dyn LoadPlanner>) -> ExitCode {
    crate::run(load_trials(name, planner))
}

/// One trial per law of [`SavePlanner`], named `name::law`. Planners that check nothing fail the
/// laws on contradictions.
#[must_use]
pub fn save_trials(name: &str, planner: Arc<dyn SavePlanner>) -> Vec<Trial> {
    trials(name, "save planner", planner, SAVE_LAWS)
}

/// One trial per law of [`LoadPlanner`], named `name::law`.
#[must_use]
pub fn load_trials(name: &str, planner: Arc<dyn LoadPlanner>) -> Vec<Trial> {
    trials(name, "load planner", planner, LOAD_LAWS)
}

type Laws<P> = &'static [(&'static str, fn(&P) -> Outcome)];

fn trials<P>(name: &str, kind: &str, planner: Arc<P>, laws: Laws<P>) -> Vec<Trial>
where
    P: ?Sized + Send + Sync + 'static,
{
    let trial = |&(law, run): &(&str, fn(&P) -> Outcome)| {
        let planner = Arc::clone(&planner);
        let body = move || report(run_thread(CASE_TIMEOUT, move || run(&planner)));
        Trial::test(format!("{name}::{law}"), body).with_kind(kind)
    };
    laws.iter().map(trial).collect()
}

macro_rules! laws {
    ($($law:ident),+ $(,)?) => { &[$((stringify!($law), $law)),+] };
}

const SAVE_LAWS: Laws<dyn SavePlanner> = laws![
    every_element_and_object_is_written_once,
    the_same_offers_give_the_same_plan,
    the_order_of_ranks_changes_nothing_that_is_stored,
    offers_are_no_longer_than_the_state,
    ranks_that_contradict_each_other_are_refused,
    chunks_that_leave_a_gap_are_refused,
];

const LOAD_LAWS: Laws<dyn LoadPlanner> = laws![
    every_wanted_element_is_read_once,
    the_same_request_gives_the_same_plan,
    what_cannot_be_loaded_is_reported_and_left_out,
];

/// A fixed sequence of numbers (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }
}

fn region(offsets: &[u64], sizes: &[u64]) -> Result<Region, crate::case::Failure> {
    Ok(Region::new(offsets, sizes)?)
}

/// What each of `parts` gets of an axis: the quotient rounded up, the last ones less.
fn part(len: u64, parts: u64, part: u64) -> (u64, u64) {
    let each = len.div_ceil(parts.max(1));
    let start = (each * part).min(len);
    (start, (start + each).min(len) - start)
}

/// How a tensor is spread.
#[derive(Clone, Copy)]
enum Spread {
    Replicated,
    Rows,
    Columns,
    /// Rows over pairs of ranks, which replicate each other.
    Pairs,
    /// Two columns of blocks.
    Blocks,
    /// Whole, on the last rank only.
    OneRank,
}

const SPREADS: [Spread; 6] = [
    Spread::Replicated,
    Spread::Rows,
    Spread::Columns,
    Spread::Pairs,
    Spread::Blocks,
    Spread::OneRank,
];

fn held(spread: Spread, shape: &[u64], rank: u64, world: u64) -> Vec<(Vec<u64>, Vec<u64>)> {
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    let mut cut = |axis: usize, parts, at| {
        if let Some(len) = shape.get(axis) {
            (offsets[axis], sizes[axis]) = part(*len, parts, at);
        }
    };
    match spread {
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
fn states(seed: u64) -> Result<(Vec<StateIndex>, BTreeMap<String, Dims>), crate::case::Failure> {
    let mut numbers = Numbers(seed);
    let world = 1 + numbers.below(6);
    let mut ranks = vec![StateIndex::default(); usize::try_from(world)?];
    let mut shapes = BTreeMap::new();
    for number in 0..1 + numbers.below(8) {
        let fqn = format!("t.{number}");
        let shape: Dims = (0..numbers.below(4)).map(|_| numbers.below(9)).collect();
        let spread = SPREADS[usize::try_from(numbers.below(6))?];
        for (rank, state) in ranks.iter_mut().enumerate() {
            let regions = held(spread, &shape, rank as u64, world)
                .iter()
                .map(|(offsets, sizes)| region(offsets, sizes))
                .collect::<Result<_, _>>()?;
            state.leaves.push(tensor(&fqn, &shape, !matches!(spread, Spread::Replicated), regions));
        }
        shapes.insert(fqn, shape);
    }
    for number in 0..numbers.below(4) {
        let leaf = object(&format!("o.{number}"), 1 + numbers.below(100));
        ranks.iter_mut().for_each(|state| state.leaves.push(leaf.clone()));
    }
    Ok((ranks, shapes))
}

fn tensor(fqn: &str, shape: &Dims, sharded: bool, regions: Vec<Region>) -> StateLeaf {
    let kind = LeafKind::Tensor { dtype: DType::Int16, shape: shape.clone(), sharded, regions };
    StateLeaf { fqn: fqn.into(), path: None, kind }
}

fn object(fqn: &str, byte_len: u64) -> StateLeaf {
    StateLeaf { fqn: fqn.into(), path: None, kind: LeafKind::Object { byte_len } }
}

fn offers(
    planner: &dyn SavePlanner,
    ranks: &[StateIndex],
) -> Result<Vec<SavePlan>, crate::case::Failure> {
    let world = u32::try_from(ranks.len())?;
    let contexts = (0..world).map(|rank| PlanContext::new(rank, world));
    let plans = ranks.iter().zip(contexts).map(|(state, context)| {
        let plan = planner.local_plan(state, &context)?;
        Ok(SavePlan::from_wire(&plan.to_wire())?)
    });
    plans.collect()
}

fn count(counts: &mut [u32], region: &Region, shape: &[u64]) -> Outcome {
    for element in region.runs_in(shape).flat_map(|(at, n)| at..at + n) {
        let slot = counts.get_mut(usize::try_from(element)?);
        ensure!(slot.is_some(), "{region} lies outside of {shape:?}");
        slot.into_iter().for_each(|slot| *slot += 1);
    }
    Ok(())
}

fn zeros(shape: &Dims) -> Result<Vec<u32>, crate::case::Failure> {
    Ok(vec![0; usize::try_from(shape.checked_volume().unwrap_or(0))?])
}

fn every_element_and_object_is_written_once(planner: &dyn SavePlanner) -> Outcome {
    for seed in 0..STATES {
        let (ranks, shapes) = states(seed)?;
        let locals = offers(planner, &ranks)?;
        let global = planner.global_plan(&locals)?;
        ensure!(
            global.selections.len() == locals.len(),
            "{} selections for {} ranks",
            global.selections.len(),
            locals.len()
        );
        let mut written: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        let mut places = BTreeSet::new();
        for (rank, (local, selected)) in locals.iter().zip(&global.selections).enumerate() {
            for selected in selected {
                let item = local.item(selected.item as usize);
                let entry = global.metadata.at(selected.entry as usize);
                let (Some(item), Some((fqn, entry))) = (item, entry) else {
                    ensure!(false, "rank {rank} is to write {selected:?}, which does not exist");
                    continue;
                };
                ensure!(*fqn == item.key.fqn, "{:?} is written as {fqn:?}", item.key.fqn);
                ensure!(
                    places.insert((selected.entry, selected.chunk)),
                    "chunk {} of {fqn:?} is written twice",
                    selected.chunk
                );
                match entry {
                    Entry::Tensor(tensor) => {
                        let chunk = tensor.chunks.get(selected.chunk as usize);
                        ensure!(
                            chunk.is_some_and(|c| (c.offsets, c.sizes) == (item.offsets, item.sizes)),
                            "chunk {} of {fqn:?} is not what rank {rank} writes",
                            selected.chunk
                        );
                        let counts = match written.get_mut(&**fqn) {
                            Some(counts) => counts,
                            None => written.entry(&**fqn).or_insert(zeros(&tensor.shape)?),
                        };
                        count(counts, &region(item.offsets, item.sizes)?, &tensor.shape)?;
                    }
                    _ => drop(written.insert(&**fqn, vec![1])),
                }
            }
        }
        let chunks = |entry: &Entry| entry.as_tensor().map_or(1, |tensor| tensor.chunks.len());
        let listed: usize = global.metadata.iter().map(|(_, entry)| chunks(entry)).sum();
        ensure!(listed == places.len(), "{listed} chunks are listed, {} written", places.len());
        for leaf in ranks.iter().flat_map(|state| &state.leaves) {
            let has_elements = shapes.get(&*leaf.fqn).is_none_or(|shape| !shape.contains(&0));
            let counts = written.get(&*leaf.fqn);
            ensure!(!has_elements || counts.is_some(), "{:?} is not written", leaf.fqn);
            let once = counts.is_none_or(|counts| counts.iter().all(|n| *n == 1));
            ensure!(once, "{:?} is not written once: {counts:?}", leaf.fqn);
        }
    }
    Ok(())
}

/// Everything that is stored, in an order of its own.
fn contents(global: &GlobalPlan) -> BTreeSet<(String, Vec<u64>, Vec<u64>)> {
    let of_entry = |(fqn, entry): (&Arc<str>, &Entry)| {
        let rows = match entry {
            Entry::Tensor(tensor) => {
                let rows = tensor.chunks.iter();
                rows.map(|chunk| (chunk.offsets.to_vec(), chunk.sizes.to_vec())).collect()
            }
            _ => vec![(Vec::new(), Vec::new())],
        };
        let fqn = fqn.to_string();
        rows.into_iter().map(move |(offsets, sizes)| (fqn.clone(), offsets, sizes))
    };
    global.metadata.iter().flat_map(of_entry).collect()
}

fn the_same_offers_give_the_same_plan(planner: &dyn SavePlanner) -> Outcome {
    for seed in 0..STATES {
        let (ranks, _) = states(seed)?;
        let locals = offers(planner, &ranks)?;
        ensure!(locals == offers(planner, &ranks)?, "two offers of one state differ");
        let (first, second) = (planner.global_plan(&locals)?, planner.global_plan(&locals)?);
        ensure!(first.selections == second.selections, "two plans of the same offers differ");
        let names = |plan: &GlobalPlan| -> Vec<_> {
            plan.metadata.iter().map(|(fqn, _)| Arc::clone(fqn)).collect()
        };
        ensure!(names(&first) == names(&second), "two plans list names in different orders");
        ensure!(contents(&first) == contents(&second), "two plans store different chunks");
    }
    Ok(())
}

fn the_order_of_ranks_changes_nothing_that_is_stored(planner: &dyn SavePlanner) -> Outcome {
    for seed in 0..STATES {
        let (ranks, _) = states(seed)?;
        let locals = offers(planner, &ranks)?;
        let stored = contents(&planner.global_plan(&locals)?);
        for turn in 1..locals.len() {
            let mut turned = locals.clone();
            turned.rotate_left(turn);
            let other = contents(&planner.global_plan(&turned)?);
            ensure!(other == stored, "ranks turned by {turn} store {other:?}, not {stored:?}");
        }
    }
    Ok(())
}

fn offers_are_no_longer_than_the_state(planner: &dyn SavePlanner) -> Outcome {
    for seed in 0..STATES {
        let (ranks, _) = states(seed)?;
        for (state, offer) in ranks.iter().zip(offers(planner, &ranks)?) {
            let rows = |leaf: &StateLeaf| match &leaf.kind {
                LeafKind::Tensor { regions, .. } => regions.len(),
                _ => 1,
            };
            let most: usize = state.leaves.iter().map(rows).sum();
            ensure!(offer.len() <= most, "{} items for {most} parts", offer.len());
        }
    }
    Ok(())
}

fn ranks_that_contradict_each_other_are_refused(planner: &dyn SavePlanner) -> Outcome {
    let whole = |dtype, shape: [u64; 1], sharded| -> Result<StateLeaf, crate::case::Failure> {
        let regions = vec![Region::full(shape)?];
        let kind = LeafKind::Tensor { dtype, shape: shape.into(), sharded, regions };
        Ok(StateLeaf { fqn: "w".into(), path: None, kind })
    };
    let first = whole(DType::Float32, [4], false)?;
    for other in [
        whole(DType::Float16, [4], false)?,
        whole(DType::Float32, [5], false)?,
        whole(DType::Float32, [4], true)?,
        object("w", 3),
    ] {
        let ranks = [first.clone(), other].map(|leaf| StateIndex { leaves: vec![leaf] });
        let refused =
            offers(planner, &ranks).and_then(|locals| Ok(planner.global_plan(&locals)?)).is_err();
        ensure!(refused, "two ranks describe one tensor differently: {ranks:?}");
    }
    Ok(())
}

fn chunks_that_leave_a_gap_are_refused(planner: &dyn SavePlanner) -> Outcome {
    let rows = |start, len| -> Result<StateIndex, crate::case::Failure> {
        let regions = vec![region(&[start, 0], &[len, 3])?];
        Ok(StateIndex { leaves: vec![tensor("w", &[6, 3].into(), true, regions)] })
    };
    for (second, why) in [((4, 2), "a gap"), ((2, 4), "an overlap")] {
        let ranks = [rows(0, 3)?, rows(second.0, second.1)?];
        let refused =
            offers(planner, &ranks).and_then(|locals| Ok(planner.global_plan(&locals)?)).is_err();
        ensure!(refused, "chunks with {why} were accepted");
    }
    Ok(())
}

/// A checkpoint of a group, and what another group wants of it.
fn request(seed: u64) -> Result<(CheckpointMetadata, Vec<StateIndex>), crate::case::Failure> {
    let (saved, shapes) = states(seed)?;
    let mut metadata = CheckpointMetadata::new();
    let file = metadata.intern_file(&Key::new("data")?).or(FileId::from_index(0));
    let encoding = metadata.intern_encoding(&Encoding::new(Layout::Raw)).unwrap_or(0);
    let placement =
        file.map(|file| Placement { file, encoding, byte_offset: 0, byte_len: 1 << 20 });
    let mut numbers = Numbers(!seed);
    let world = 1 + numbers.below(6);
    let mut wanted = vec![StateIndex::default(); usize::try_from(world)?];
    for (position, leaf) in saved[0].leaves.iter().enumerate() {
        let Some(shape) = shapes.get(&*leaf.fqn) else {
            metadata.insert(Arc::clone(&leaf.fqn), Entry::Object(ObjectEntry::new(placement)));
            wanted.iter_mut().for_each(|state| state.leaves.push(leaf.clone()));
            continue;
        };
        let mut entry = TensorEntry::new(DType::Int16, shape.clone());
        let mut seen = BTreeSet::new();
        for state in &saved {
            let LeafKind::Tensor { regions, .. } = &state.leaves[position].kind else { continue };
            for region in regions.iter().filter(|region| seen.insert((*region).clone())) {
                entry.chunks.push(region.offsets(), region.sizes(), placement)?;
            }
        }
        metadata.insert(Arc::clone(&leaf.fqn), Entry::Tensor(entry));
        let spread = SPREADS[usize::try_from(numbers.below(6))?];
        for (rank, state) in wanted.iter_mut().enumerate() {
            let regions = held(spread, shape, rank as u64, world)
                .iter()
                .map(|(offsets, sizes)| region(offsets, sizes))
                .collect::<Result<_, _>>()?;
            state.leaves.push(tensor(&leaf.fqn, shape, true, regions));
        }
    }
    Ok((metadata, wanted))
}

fn plan(
    planner: &dyn LoadPlanner,
    wanted: &StateIndex,
    stored: &CheckpointMetadata,
) -> Result<(LoadPlan, LoadReport), crate::case::Failure> {
    Ok(planner.local_plan(wanted, stored, &PlanContext::solo())?)
}

fn every_wanted_element_is_read_once(planner: &dyn LoadPlanner) -> Outcome {
    for seed in 0..STATES {
        let (metadata, wanted) = request(seed)?;
        for wanted in wanted {
            let (plan, report) = plan(planner, &wanted, &metadata)?;
            ensure!(report.is_complete(), "a complete checkpoint is reported: {report}");
            let mut read: BTreeMap<(u32, u32), Vec<u32>> = BTreeMap::new();
            let mut objects = BTreeSet::new();
            for item in &plan.items {
                let leaf = wanted.leaves.get(item.leaf as usize);
                let entry = metadata.at(item.entry as usize);
                let (Some(leaf), Some((fqn, entry))) = (leaf, entry) else {
                    ensure!(false, "{item:?} refers to nothing");
                    continue;
                };
                ensure!(leaf.fqn == *fqn, "{fqn:?} is read into {:?}", leaf.fqn);
                match (&item.kind, entry, &leaf.kind) {
                    (
                        ReadKind::Tensor { chunk, shard, region },
                        Entry::Tensor(tensor),
                        LeafKind::Tensor { regions, .. },
                    ) => {
                        let chunk = tensor.chunks.get(*chunk as usize);
                        let source = chunk.and_then(|chunk| chunk.region().ok());
                        let target = regions.get(*shard as usize);
                        let inside = source.is_some_and(|source| source.contains(region))
                            && target.is_some_and(|target| target.contains(region));
                        ensure!(inside, "{item:?} lies outside of its chunk or shard");
                        let counts = match read.get_mut(&(item.leaf, *shard)) {
                            Some(counts) => counts,
                            None => {
                                read.entry((item.leaf, *shard)).or_insert(zeros(&tensor.shape)?)
                            }
                        };
                        count(counts, region, &tensor.shape)?;
                    }
                    (ReadKind::Object, Entry::Object(_), LeafKind::Object { .. }) => {
                        ensure!(objects.insert(item.leaf), "{fqn:?} is read twice");
                    }
                    _ => ensure!(false, "{fqn:?} is read as {:?}", item.kind),
                }
            }
            for (position, leaf) in wanted.leaves.iter().enumerate() {
                let position = u32::try_from(position)?;
                let LeafKind::Tensor { regions, shape, .. } = &leaf.kind else {
                    ensure!(objects.contains(&position), "{:?} is not read", leaf.fqn);
                    continue;
                };
                for (shard, region) in regions.iter().enumerate() {
                    let mut expected = zeros(shape)?;
                    count(&mut expected, region, shape)?;
                    let shard = u32::try_from(shard)?;
                    let found = read.remove(&(position, shard)).map_or_else(|| zeros(shape), Ok)?;
                    ensure!(found == expected, "{:?} {region} is read {found:?}", leaf.fqn);
                }
            }
        }
    }
    Ok(())
}

fn the_same_request_gives_the_same_plan(planner: &dyn LoadPlanner) -> Outcome {
    for seed in 0..STATES {
        let (metadata, wanted) = request(seed)?;
        for wanted in wanted {
            let (first, second) =
                (plan(planner, &wanted, &metadata)?, plan(planner, &wanted, &metadata)?);
            ensure!(first == second, "two plans of one request differ");
        }
    }
    Ok(())
}

fn what_cannot_be_loaded_is_reported_and_left_out(planner: &dyn LoadPlanner) -> Outcome {
    let mut metadata = CheckpointMetadata::new();
    let placement = metadata.intern_file(&Key::new("data")?).map(|file| Placement {
        file,
        encoding: metadata.intern_encoding(&Encoding::new(Layout::Raw)).unwrap_or(0),
        byte_offset: 0,
        byte_len: 8,
    });
    for (fqn, dtype, shape) in
        [("half", DType::Int16, 8), ("cast", DType::Float64, 4), ("grown", DType::Int16, 3)]
    {
        let mut entry = TensorEntry::new(dtype, [shape]);
        entry.chunks.push(&[0], &[4.min(shape)], placement)?;
        metadata.insert(fqn, Entry::Tensor(entry));
    }
    for fqn in ["other", "kind"] {
        metadata.insert(fqn, Entry::Object(ObjectEntry::new(placement)));
    }
    let leaf = |fqn, shape: u64| -> Result<StateLeaf, crate::case::Failure> {
        Ok(tensor(fqn, &[shape].into(), false, vec![Region::full([shape])?]))
    };
    let leaves = vec![
        leaf("half", 8)?,
        leaf("cast", 4)?,
        leaf("grown", 4)?,
        leaf("kind", 1)?,
        object("absent", 0),
    ];
    let (plan, report) = plan(planner, &StateIndex { leaves }, &metadata)?;
    ensure!(!report.is_complete(), "an incomplete checkpoint counts as complete");
    let names = |names: &[Arc<str>]| names.join(" ");
    ensure!(names(&report.missing) == "absent", "missing are {:?}", report.missing);
    ensure!(names(&report.unexpected) == "other", "unexpected are {:?}", report.unexpected);
    ensure!(report.dtypes.len() == 1 && &*report.dtypes[0].0 == "cast", "{:?}", report.dtypes);
    ensure!(report.shapes.len() == 1 && &*report.shapes[0].0 == "grown", "{:?}", report.shapes);
    ensure!(report.kinds.len() == 1 && &*report.kinds[0].0 == "kind", "{:?}", report.kinds);
    ensure!(report.uncovered == [("half".into(), 4)], "{:?}", report.uncovered);
    let read: Vec<u32> = plan.items.iter().map(|item| item.leaf).collect();
    ensure!(read == [0], "leaves {read:?} are read instead of the first alone");
    Ok(())
}
