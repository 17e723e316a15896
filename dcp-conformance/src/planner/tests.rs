//! The suite finds planners that change what they plan.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use dcp_core::metadata::{ChunkTable, Entry, ObjectEntry, TensorEntry};
use dcp_core::plan::{
    GlobalPlan, LeafKind, LoadPlan, LoadReport, PlanContext, PlanKey, ReadKind, SavePlan,
    SelectedItem, StateIndex, TensorSpec,
};
use dcp_core::{CheckpointMetadata, DType, Dims, PlanError, Region};
use dcp_planner::DefaultLoadPlanner;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Flaw {
    None,
    CastsTensors,
    ReshapesTensors,
    MovesRegions,
    ShortensObjects,
    LengthensObjects,
    MakesUpNames,
    IndexesOtherDTypes,
    WritesTwice,
    LosesItems,
    DropsLeaves,
    DropsChunks,
    DropsTheSecondRegion,
    SwapsRegionsOfOffers,
    LosesPathsOfOffers,
    LosesPathsOfTheIndex,
    OverlapsChunks,
}

/// Offers all there is, and lets the first of equal offers be written.
#[derive(Debug)]
struct Flawed(Flaw);

impl SavePlanner for Flawed {
    fn local_plan(&self, state: &StateIndex, _: &PlanContext) -> Result<SavePlan, PlanError> {
        let mut plan = SavePlan::new();
        for leaf in &state.leaves {
            if self.0 == Flaw::DropsLeaves && matches!(leaf.kind, LeafKind::Object { .. }) {
                continue;
            }
            let lost = self.0 == Flaw::LosesPathsOfOffers;
            let (fqn, path) = (Arc::clone(&leaf.fqn), leaf.path.clone().filter(|_| !lost));
            match &leaf.kind {
                LeafKind::Tensor { dtype, shape, sharded, regions } => {
                    let (mut dtype, mut shape) = (*dtype, shape.clone());
                    if self.0 == Flaw::CastsTensors {
                        dtype = DType::Int8;
                    }
                    if self.0 == Flaw::ReshapesTensors {
                        shape = shape.iter().map(|len| len + 1).collect();
                    }
                    let tensor = Some(TensorSpec { dtype, shape, sharded: *sharded });
                    let at = plan.push_key(PlanKey { fqn, path, tensor });
                    for (n, region) in regions.iter().enumerate() {
                        if self.0 == Flaw::DropsChunks && n == 0
                            || self.0 == Flaw::DropsTheSecondRegion && n == 1
                        {
                            continue;
                        }
                        // The other of two regions twice, and this one not at all.
                        let region = match regions.get(1 - n.min(1)) {
                            Some(other) if self.0 == Flaw::SwapsRegionsOfOffers && n == 0 => other,
                            _ => region,
                        };
                        if self.0 == Flaw::OverlapsChunks && region.volume() > 1 {
                            let point = vec![1; region.ndim()];
                            plan.push_chunk(at, &Region::new(&**region.offsets(), point).unwrap())?;
                        }
                        let moved: Dims = region.offsets().iter().map(|at| at + 1).collect();
                        let moved = match self.0 {
                            Flaw::MovesRegions => Region::new(moved, region.sizes().to_vec()).ok(),
                            _ => None,
                        };
                        plan.push_chunk(at, moved.as_ref().unwrap_or(region))?;
                    }
                }
                LeafKind::Object { byte_len } => {
                    let at = plan.push_key(PlanKey { fqn, path, tensor: None });
                    plan.push_object(
                        at,
                        match self.0 {
                            Flaw::ShortensObjects => byte_len - 1,
                            Flaw::LengthensObjects => byte_len + 1,
                            _ => *byte_len,
                        },
                    )?;
                }
                _ => unreachable!(),
            }
        }
        if self.0 == Flaw::MakesUpNames {
            let at = plan.push_key(PlanKey { fqn: "extra".into(), path: None, tensor: None });
            plan.push_object(at, 7)?;
        }
        Ok(plan)
    }

    fn global_plan(&self, locals: &[SavePlan]) -> Result<GlobalPlan, PlanError> {
        let (mut entries, mut order, mut paths) = (HashMap::new(), Vec::new(), Vec::new());
        let mut selections = vec![Vec::new(); locals.len()];
        for (rank, local) in locals.iter().enumerate() {
            for (index, item) in local.items().enumerate() {
                let fqn = &item.key.fqn;
                let place = *entries.entry(Arc::clone(fqn)).or_insert_with(|| {
                    let chunks = ChunkTable::new(item.sizes.len());
                    let path = item.key.path.clone();
                    paths.push(path.filter(|_| self.0 != Flaw::LosesPathsOfTheIndex));
                    order.push((Arc::clone(fqn), item.key.tensor.clone(), chunks, false));
                    order.len() - 1
                });
                let (_, _, chunks, there) = &mut order[place];
                let equal = |c: dcp_core::metadata::ChunkRef<'_>| {
                    (c.offsets, c.sizes) == (item.offsets, item.sizes)
                };
                let taken = if item.is_tensor() { chunks.iter().any(equal) } else { *there };
                *there = true;
                if taken && self.0 != Flaw::WritesTwice {
                    continue;
                }
                let mut chunk = 0;
                if item.is_tensor() && !taken {
                    chunk = chunks.push(item.offsets, item.sizes, None).unwrap();
                }
                if self.0 == Flaw::LosesItems && rank + 1 == locals.len() {
                    continue;
                }
                selections[rank].push(SelectedItem {
                    item: index as u32,
                    entry: place as u32,
                    chunk: chunk as u32,
                });
            }
        }
        let mut metadata = CheckpointMetadata::new();
        for ((fqn, spec, chunks, _), path) in order.into_iter().zip(paths) {
            let entry = match spec {
                None => {
                    let mut object = ObjectEntry::new(None);
                    object.path = path;
                    Entry::Object(object)
                }
                Some(spec) => {
                    let other = self.0 == Flaw::IndexesOtherDTypes;
                    let dtype = if other { DType::Int8 } else { spec.dtype };
                    let mut tensor = TensorEntry::new(dtype, spec.shape);
                    tensor.chunks = chunks;
                    tensor.path = path;
                    Entry::Tensor(tensor)
                }
            };
            metadata.insert(fqn, entry);
        }
        Ok(GlobalPlan { metadata, selections, ..GlobalPlan::default() })
    }
}

fn holds(law: &str, flaw: Flaw) -> bool {
    let (_, run) = SAVE_LAWS.iter().find(|(name, _)| *name == law).unwrap();
    run(&Flawed(flaw)).is_ok()
}

#[test]
fn planners_that_change_what_they_plan_are_found() {
    let (offers, plan) = ("offers_describe_the_state", "the_plan_describes_the_offers");
    assert!(holds(offers, Flaw::None) && holds(plan, Flaw::None));
    for flaw in [
        Flaw::CastsTensors,
        Flaw::ReshapesTensors,
        Flaw::MovesRegions,
        Flaw::ShortensObjects,
        Flaw::LengthensObjects,
        Flaw::MakesUpNames,
    ] {
        assert!(!holds(offers, flaw), "{flaw:?} is not found");
    }
    for flaw in [Flaw::IndexesOtherDTypes, Flaw::WritesTwice, Flaw::LosesItems] {
        assert!(holds(offers, flaw), "{flaw:?}");
        assert!(!holds(plan, flaw), "{flaw:?} is not found");
    }
    let stored = "what_ranks_hold_is_stored_once";
    assert!(holds(stored, Flaw::None));
    for flaw in [
        Flaw::DropsLeaves,
        Flaw::DropsChunks,
        Flaw::DropsTheSecondRegion,
        Flaw::SwapsRegionsOfOffers,
        Flaw::OverlapsChunks,
    ] {
        assert!(holds(offers, flaw), "{flaw:?}");
        assert!(!holds(stored, flaw), "{flaw:?} is not found");
    }
    let paths = "the_plan_has_the_paths_of_the_state";
    assert!(holds(paths, Flaw::None));
    assert!(!holds(offers, Flaw::LosesPathsOfOffers), "the engine does not find lost paths");
    for flaw in [Flaw::LosesPathsOfOffers, Flaw::LosesPathsOfTheIndex] {
        assert!(!holds(paths, flaw), "{flaw:?} is not found");
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum LoadFlaw {
    None,
    DropsTheSecondShard,
    SwapsShards,
    ReadsTwice,
    LosesObjects,
    ChangesItsMind,
    ReportsNothing,
}

/// The default planner with a flaw.
#[derive(Debug)]
struct FlawedLoad(LoadFlaw, AtomicUsize);

impl LoadPlanner for FlawedLoad {
    fn local_plan(
        &self,
        wanted: &StateIndex,
        stored: &CheckpointMetadata,
        context: &PlanContext,
    ) -> Result<(LoadPlan, LoadReport), PlanError> {
        let (mut plan, mut report) =
            DefaultLoadPlanner::new().local_plan(wanted, stored, context)?;
        match self.0 {
            LoadFlaw::None => {}
            LoadFlaw::DropsTheSecondShard => {
                plan.items.retain(|item| !matches!(item.kind, ReadKind::Tensor { shard: 1, .. }));
            }
            LoadFlaw::SwapsShards => {
                let is_of_two = |leaf: u32| match &wanted.leaves[leaf as usize].kind {
                    LeafKind::Tensor { regions, .. } => regions.len() == 2,
                    _ => false,
                };
                for item in &mut plan.items {
                    if let ReadKind::Tensor { shard, .. } = &mut item.kind
                        && is_of_two(item.leaf)
                    {
                        *shard = 1 - *shard;
                    }
                }
            }
            LoadFlaw::ReadsTwice => plan.items.extend(plan.items.last().cloned()),
            LoadFlaw::LosesObjects => plan.items.retain(|item| item.kind != ReadKind::Object),
            LoadFlaw::ChangesItsMind => {
                let len = plan.items.len().max(1);
                plan.items.rotate_left(self.1.fetch_add(1, Ordering::Relaxed) % len);
            }
            LoadFlaw::ReportsNothing => report = LoadReport::default(),
        }
        Ok((plan, report))
    }
}

#[test]
fn planners_that_read_something_else_are_found() {
    let holds = |law: &str, flaw| {
        let (_, run) = LOAD_LAWS.iter().find(|(name, _)| *name == law).unwrap();
        run(&FlawedLoad(flaw, AtomicUsize::new(0))).is_ok()
    };
    for (flaw, law) in [
        (LoadFlaw::DropsTheSecondShard, "every_wanted_element_is_read_once"),
        (LoadFlaw::SwapsShards, "every_wanted_element_is_read_once"),
        (LoadFlaw::ReadsTwice, "every_wanted_element_is_read_once"),
        (LoadFlaw::LosesObjects, "every_wanted_element_is_read_once"),
        (LoadFlaw::ChangesItsMind, "the_same_request_gives_the_same_plan"),
        (LoadFlaw::ReportsNothing, "what_cannot_be_loaded_is_reported_and_left_out"),
    ] {
        assert!(holds(law, LoadFlaw::None), "{law}");
        assert!(!holds(law, flaw), "{flaw:?} is not found by {law}");
    }
}
