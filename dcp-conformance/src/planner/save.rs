//! The laws of a save planner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_core::metadata::Entry;
use dcp_core::plan::{GlobalPlan, LeafKind, PlanContext, SavePlan, StateIndex, StateLeaf};
use dcp_core::planner::SavePlanner;
use dcp_core::{DType, Region};

use super::states::*;
use super::{Laws, STATES, laws};
use crate::case::{Failure, Outcome, ensure};

pub(super) const SAVE_LAWS: Laws<dyn SavePlanner> = laws![
    every_element_and_object_is_written_once,
    offers_describe_the_state,
    the_plan_describes_the_offers,
    what_ranks_hold_is_stored_once,
    the_plan_has_the_paths_of_the_state,
    the_same_offers_give_the_same_plan,
    the_order_of_ranks_changes_nothing_that_is_stored,
    offers_are_no_longer_than_the_state,
    ranks_that_contradict_each_other_are_refused,
    chunks_that_leave_a_gap_are_refused,
];

pub(super) fn offers(
    planner: &dyn SavePlanner,
    ranks: &[StateIndex],
) -> Result<Vec<SavePlan>, Failure> {
    let world = u32::try_from(ranks.len())?;
    let contexts = (0..world).map(|rank| PlanContext::new(rank, world));
    let plans = ranks.iter().zip(contexts).map(|(state, context)| {
        let plan = planner.local_plan(state, &context)?;
        Ok(SavePlan::from_wire(&plan.to_wire())?)
    });
    plans.collect()
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

fn offers_describe_the_state(planner: &dyn SavePlanner) -> Outcome {
    for seed in 0..STATES {
        let (ranks, _) = states(seed)?;
        for (state, mut offer) in ranks.iter().zip(offers(planner, &ranks)?) {
            offer.check_against(state, "under test")?;
        }
    }
    Ok(())
}

fn the_plan_describes_the_offers(planner: &dyn SavePlanner) -> Outcome {
    for seed in 0..STATES {
        let (ranks, _) = states(seed)?;
        let locals = offers(planner, &ranks)?;
        planner.global_plan(&locals)?.check_against(&locals, "under test")?;
    }
    Ok(())
}

fn what_ranks_hold_is_stored_once(planner: &dyn SavePlanner) -> Outcome {
    for seed in 0..STATES {
        let (ranks, _) = states(seed)?;
        let mut locals = offers(planner, &ranks)?;
        let global = planner.global_plan(&locals)?;
        for (state, local) in ranks.iter().zip(&mut locals) {
            local.check_against(state, "under test")?;
        }
        global.check_against(&locals, "under test")?;
    }
    Ok(())
}

/// A nested state dict is nested again after a load by the paths in the index.
fn the_plan_has_the_paths_of_the_state(planner: &dyn SavePlanner) -> Outcome {
    for seed in 0..STATES {
        let (ranks, _) = states(seed)?;
        let global = planner.global_plan(&offers(planner, &ranks)?)?;
        for leaf in ranks.iter().flat_map(|state| &state.leaves) {
            let Some(entry) = global.metadata.get(&leaf.fqn) else { continue };
            ensure!(
                entry.path() == leaf.path.as_ref(),
                "{:?} has the path {:?} in the index and {:?} in the state",
                leaf.fqn,
                entry.path(),
                leaf.path
            );
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
    let whole = |dtype, shape: [u64; 1], sharded| -> Result<StateLeaf, Failure> {
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
    let rows = |start, len| -> Result<StateIndex, Failure> {
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
