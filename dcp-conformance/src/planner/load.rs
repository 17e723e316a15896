//! The laws of a load planner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_core::metadata::{Encoding, Entry, FileId, Layout, ObjectEntry, Placement, TensorEntry};
use dcp_core::plan::{
    LeafKind, LoadPlan, LoadReport, PlanContext, ReadKind, StateIndex, StateLeaf,
};
use dcp_core::planner::LoadPlanner;
use dcp_core::{CheckpointMetadata, DType, Key, Region};

use super::states::*;
use super::{Laws, STATES, laws};
use crate::case::{Failure, Outcome, ensure};
use crate::numbers::Numbers;

pub(super) const LOAD_LAWS: Laws<dyn LoadPlanner> = laws![
    every_wanted_element_is_read_once,
    the_same_request_gives_the_same_plan,
    what_cannot_be_loaded_is_reported_and_left_out,
];

/// A checkpoint of a group, and the requests of another group.
fn request(seed: u64) -> Result<(CheckpointMetadata, Vec<StateIndex>), Failure> {
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
        let spread = SPREADS[usize::try_from(numbers.below(SPREADS.len() as u64))?];
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
) -> Result<(LoadPlan, LoadReport), Failure> {
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
                        ensure!(inside, "{item:?} is outside its chunk or shard");
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
    let leaf = |fqn, shape: u64| -> Result<StateLeaf, Failure> {
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
