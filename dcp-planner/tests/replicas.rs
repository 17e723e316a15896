//! Plans that several ranks share are merged once, with the result of one after the other.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use bytes::Bytes;
use dcp_core::plan::{PlanContext, SavePlan, SelectedItem};
use dcp_core::planner::SavePlanner;
use dcp_core::wire::{PlanParts, PlanRequest};
use dcp_core::{PlanError, Region};
use dcp_planner::{DedupPolicy, DefaultSavePlanner};
use proptest::prelude::*;
use proptest::sample::Index;
use support::{index, object, tensor};

const SHAPE: [u64; 2] = [8, 8];
const TENSORS: usize = 4;

/// What ranks of one kind hold: the parts of each tensor, the length of an object, and the name that
/// comes first.
type Kind = (Vec<Vec<usize>>, Option<u64>, usize);

/// Four parts that are the tensor, one without elements, and one that contradicts the first.
fn part(number: usize) -> Region {
    match number {
        4 => Region::new([2, 0], [0, 8]).unwrap(),
        5 => Region::new([0, 0], [4, 8]).unwrap(),
        row => Region::new([2 * row as u64, 0], [2, 8]).unwrap(),
    }
}

fn kind() -> impl Strategy<Value = Kind> {
    let part = prop_oneof![40 => 0_usize..4, 4 => Just(4_usize), 1 => Just(5_usize)];
    let parts = prop::collection::vec(part, 0..5);
    let whole = Just(vec![0, 1, 2, 3]);
    let held = prop::collection::vec(prop_oneof![parts, whole], TENSORS);
    (held, prop::option::of(1_u64..90), 0..TENSORS)
}

fn local(rank: usize, ranks: usize, (held, byte_len, first): &Kind) -> SavePlan {
    let leaf = |n: usize| {
        let parts = held[n].iter().map(|number| part(*number)).collect();
        tensor(&format!("t.{n}"), &SHAPE, true, parts)
    };
    let mut leaves: Vec<_> = (0..TENSORS).map(leaf).collect();
    leaves.rotate_left(*first);
    leaves.extend(byte_len.map(|byte_len| object("step", byte_len)));
    let state = index(leaves);
    let context = PlanContext::new(rank as u32, ranks as u32);
    let mut plan = DefaultSavePlanner::new().local_plan(&state, &context).unwrap();
    plan.check_against(&state, "plain").unwrap();
    plan
}

type Planned = (Bytes, Vec<Vec<SelectedItem>>, Result<(), PlanError>);

fn planned(planner: DefaultSavePlanner, locals: &[SavePlan]) -> Result<Planned, PlanError> {
    let global = planner.global_plan(locals)?;
    let checked = global.check_against(locals, "plain");
    Ok((global.metadata.to_wire(), global.selections, checked))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_plan_of_several_ranks_is_merged_as_one_of_each(
        kinds in prop::collection::vec(kind(), 1..5),
        ranks in prop::collection::vec(any::<Index>(), 1..24),
    ) {
        let kind_of = |rank: usize| &kinds[ranks[rank].index(kinds.len())];
        let locals: Vec<_> =
            (0..ranks.len()).map(|rank| local(rank, ranks.len(), kind_of(rank))).collect();
        let parts: Vec<_> = locals.iter().map(SavePlan::to_parts).collect();
        let summaries: Vec<_> = parts.iter().map(PlanParts::summary).collect();
        let request = PlanRequest::of(&summaries);
        let answers: Vec<_> =
            (0..).zip(&parts).map(|(rank, parts)| request.answer(rank, parts)).collect();
        let shared = SavePlan::from_answers(&summaries, &answers).unwrap();
        prop_assert!(SavePlan::group_shared(&shared).len() <= kinds.len());
        prop_assert_eq!(SavePlan::group_shared(&locals).len(), locals.len());

        let planner = DefaultSavePlanner::new();
        for policy in
            [DedupPolicy::Balanced, DedupPolicy::TorchCompatible, DedupPolicy::LowestRank]
        {
            for validate in [true, false] {
                let planner = planner.dedup(policy).validate(validate);
                prop_assert_eq!(planned(planner, &shared), planned(planner, &locals));
            }
        }
    }
}
