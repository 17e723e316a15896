//! Which rank writes what.

use std::num::NonZeroU32;

use dcp_core::plan::{PlanContext, SavePlan, StateIndex};
use dcp_core::planner::SavePlanner as _;
use dcp_core::{DType, PlanError, StateDict, Tensor};
use dcp_planner::{DefaultSavePlanner, FlattenRule, flatten, index_of};
use node_planner::NodePlanner;

const MIB: u64 = 1 << 20;

/// Rank 0, 1 and 2 of the first node hold nothing of their own. Rank 3, alone on the second node,
/// has `own` bytes.
fn state(rank: u32, own: u64) -> StateIndex {
    let mut state = StateDict::new();
    for at in 0..8 {
        let tensor = Tensor::zeros(DType::UInt8, [MIB]).unwrap();
        state.insert(format!("replicated.{at}"), tensor);
    }
    if rank == 3 && own > 0 {
        state.insert("own", Tensor::zeros(DType::UInt8, [own]).unwrap());
    }
    let flat = flatten(&state, FlattenRule::default()).unwrap();
    index_of(&flat, |_, _| Ok::<_, PlanError>(0)).unwrap()
}

/// Bytes that each rank writes.
fn written(own: u64, spread: bool) -> Vec<u64> {
    let nodes = NodePlanner::new(NonZeroU32::new(3).unwrap());
    let default = DefaultSavePlanner::new();
    let locals: Vec<SavePlan> = (0..4)
        .map(|rank| nodes.local_plan(&state(rank, own), &PlanContext::new(rank, 4)).unwrap())
        .collect();
    let plan = if spread { nodes.global_plan(&locals) } else { default.global_plan(&locals) };
    let bytes = |(local, selected): (&SavePlan, &Vec<_>)| {
        let len =
            |item: &dcp_core::plan::SelectedItem| local.item(item.item as usize).unwrap().byte_len;
        selected.iter().map(len).sum()
    };
    locals.iter().zip(&plan.unwrap().selections).map(bytes).collect()
}

#[test]
fn nodes_write_equally_many_bytes() {
    assert_eq!(written(0, false), [2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB]);
    let spread = written(0, true);
    assert_eq!(spread[..3].iter().sum::<u64>(), 4 * MIB);
    assert_eq!(spread[3], 4 * MIB);
}

#[test]
fn what_only_one_rank_holds_counts_for_its_node() {
    let spread = written(6 * MIB, true);
    assert_eq!(spread[..3].iter().sum::<u64>(), 7 * MIB);
    assert_eq!(spread[3], 7 * MIB);
    assert!(spread[..3].iter().all(|bytes| *bytes >= 2 * MIB), "{spread:?}");
}
