//! Ranks of a first save send what the coordinator does not know from other ranks.

use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::plan::{GlobalPlan, PlanContext, SavePlan, StateIndex};
use dcp_core::planner::SavePlanner;
use dcp_core::{Collective, DType, PlanError, Region, StateDict, Tensor};
use dcp_engine::{Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_planner::DefaultSavePlanner;
use dcp_testing::CountingCollective;

use crate::harness::{
    block_on, counting, counting_whole, memory, on_ranks, on_tcp_ranks, rows, same, sample,
};

const TENSORS: u64 = 1000;

/// Layers of nine tensors each.
fn shape(n: u64) -> [u64; 2] {
    [[8, 3], [8, 1], [12, 3], [16, 2], [4, 4]][n as usize % 9 % 5]
}

/// Bytes that each rank sends and receives for its plan in a first save: offer, request, answer and
/// write plan.
fn first_save(ranks: u32, state: impl Fn(u32) -> StateDict + Sync) -> Vec<[usize; 4]> {
    let place = memory();
    on_ranks(ranks, |rank, group| {
        let group = Arc::new(CountingCollective::new(group));
        let saver = Saver::with_settings(Settings::in_group(Arc::clone(&group) as _));
        let writer = DcpWriter::new(Arc::clone(&place));
        let saved = block_on(saver.save(&state(rank), &writer)).unwrap();
        assert!(!saved.reused_plan && saved.entries == TENSORS);
        let calls = group.take();
        let plan = [calls[0], calls[1], calls[2], calls[3]];
        assert_eq!(plan.map(|call| call.0), ["gather", "broadcast", "gather", "scatter"]);
        plan.map(|call| call.1)
    })
}

#[test]
fn a_replica_plans_1000_items_in_few_bytes() {
    let sizes = first_save(4, |_| {
        let tensor = |n| (format!("layers.{}.part{}", n / 9, n % 9), counting_whole(&shape(n), 1));
        (0..TENSORS).map(tensor).collect()
    });
    assert!(sizes[0][2] > 2000, "{sizes:?}");
    for [offer, request, answer, _] in &sizes[1..] {
        assert_eq!(*answer, 0);
        assert!(offer + request <= 96, "{sizes:?}");
    }
    // Each writes every fourth item, or another part of them.
    assert!(sizes.iter().all(|[.., places]| *places <= 400), "{sizes:?}");
}

#[test]
fn a_rank_with_rows_of_1000_items_plans_in_few_bytes() {
    let sizes = first_save(4, |rank| {
        let tensor = |n| {
            let region = rows(&shape(n), rank, 4);
            (format!("layers.{}.part{}", n / 9, n % 9), counting(&shape(n), &[region], 1))
        };
        (0..TENSORS).map(tensor).collect()
    });
    for [offer, request, answer, places] in &sizes[1..] {
        assert!(offer + request <= 96, "{sizes:?}");
        assert!(*answer <= 64, "{sizes:?}");
        assert!(*places <= 128, "{sizes:?}");
    }
}

#[test]
fn a_damaged_plan_is_refused_on_all_ranks_by_the_name_of_its_rank() {
    for damaged in [0, 2] {
        let place = memory();
        let errors = on_ranks(3, |rank, group| {
            let group = CountingCollective::new(group);
            // After the offer and the request.
            let group = if rank == damaged { group.cut(2) } else { group };
            let saver = Saver::with_settings(Settings::in_group(Arc::new(group)));
            let writer = DcpWriter::new(Arc::clone(&place));
            let saved = block_on(saver.save(&sample(rank, 3, 1), &writer));
            error_chain(&saved.unwrap_err())
        });
        for error in errors {
            assert!(error.contains(&format!("the plan of rank {damaged}")), "{error}");
        }
    }
}

/// Offers in reverse order, and on rank 3 nothing that is replicated.
#[derive(Debug)]
struct Reversed;

impl SavePlanner for Reversed {
    fn local_plan(&self, state: &StateIndex, context: &PlanContext) -> Result<SavePlan, PlanError> {
        let all = DefaultSavePlanner::new().local_plan(state, context)?;
        let mut plan = SavePlan::new();
        for at in (0..all.len()).rev() {
            let Some(item) = all.item(at) else { continue };
            let sharded = item.key.tensor.as_ref().is_some_and(|spec| spec.sharded);
            if !sharded && context.rank == 3 {
                continue;
            }
            let key = plan.push_key(item.key.clone());
            match item.is_tensor() {
                true => plan.push_chunk(key, &Region::new(item.offsets, item.sizes).unwrap())?,
                false => plan.push_object(key, item.byte_len)?,
            }
        }
        Ok(plan)
    }

    fn global_plan(&self, locals: &[SavePlan]) -> Result<GlobalPlan, PlanError> {
        DefaultSavePlanner::new().global_plan(locals)
    }
}

/// Ranks 0 and 3 hold the same, rank 1 nothing, rank 2 what no other rank has; the first tensor is
/// divided unevenly among all but rank 1.
fn unlike(rank: u32) -> StateDict {
    let mut state = StateDict::new();
    if rank == 1 {
        return state;
    }
    let part = match rank {
        2 => Region::new([5, 0], [2, 3]).unwrap(),
        _ => Region::new([0, 0], [5, 3]).unwrap(),
    };
    state.insert("divided", counting(&[7, 3], &[part], 10));
    match rank {
        2 => {
            state.insert("own", counting_whole(&[9], 40));
            state.insert("note", "of rank 2");
        }
        _ => {
            state.insert("shared", counting_whole(&[4, 2], 70));
            state.insert("step", 12);
        }
    }
    state
}

/// Saves [`unlike`] with each planner, and reads all of it.
fn save_and_load(on_ranks: impl Fn(&(dyn Fn(u32, Arc<dyn Collective>) + Sync))) {
    let planners: [Arc<dyn SavePlanner>; 2] =
        [Arc::new(DefaultSavePlanner::new()), Arc::new(Reversed)];
    for planner in planners {
        let place = memory();
        on_ranks(&|rank, group| {
            // The coordinator is the rank with nothing to save.
            let saver = Saver::with_settings(
                Settings::in_group(group).coordinator(1).save_planner(Arc::clone(&planner)),
            );
            let writer = DcpWriter::new(Arc::clone(&place));
            let saved = [0, 1].map(|_| block_on(saver.save(&unlike(rank), &writer)).unwrap());
            assert_eq!(saved.map(|saved| saved.reused_plan), [false, true]);
        });
        let mut state = StateDict::new();
        for (name, len) in [("own", &[9_u64][..]), ("shared", &[4, 2]), ("divided", &[7, 3])] {
            state.insert(name, Tensor::zeros(DType::Int32, len).unwrap());
        }
        state.insert("step", 0);
        state.insert("note", "");
        let reader = DcpReader::new(place);
        block_on(Loader::new().load(&mut state, &reader)).unwrap();
        let mut expected = StateDict::new();
        for (name, len, first) in
            [("own", &[9_u64][..], 40), ("shared", &[4, 2], 70), ("divided", &[7, 3], 10)]
        {
            expected.insert(name, counting_whole(len, first));
        }
        expected.insert("step", 12);
        expected.insert("note", "of rank 2");
        assert!(same(&state, &expected), "{planner:?}");
    }
}

#[test]
fn ranks_with_equal_disjoint_and_no_plans_save_together() {
    save_and_load(|main| drop(on_ranks(4, main)));
}

#[test]
fn ranks_with_equal_disjoint_and_no_plans_save_together_over_tcp() {
    save_and_load(|main| drop(on_tcp_ranks(4, main)));
}
