//! Global plans of random layouts, against a validation that looks at every element.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeSet;

use bytes::Bytes;
use dcp_core::plan::{PlanContext, SavePlan};
use dcp_core::planner::SavePlanner;
use dcp_core::wire::{PlanParts, PlanRequest};
use dcp_core::{CheckpointError, PlanError, Region};
use dcp_planner::DefaultSavePlanner;
use proptest::prelude::*;
use support::{index, tensor};

/// The shape of a tensor, and the regions that each rank holds.
type Held = ([u64; 2], Vec<Vec<Region>>);

/// Cuts a tensor at random places into a grid, deals the parts out, and changes some of them.
fn held(ranks: usize) -> impl Strategy<Value = Held> {
    let cuts = || prop::collection::btree_set(1_u64..8, 0..3);
    let deal = prop::collection::vec((0..ranks, 0..ranks), 16);
    let change = prop::option::weighted(0.3, (any::<prop::sample::Index>(), 0_usize..4));
    ([1_u64..9, 1_u64..9], cuts(), cuts(), deal, change).prop_map(
        move |(shape, rows, columns, deal, change)| {
            let mut parts: Vec<Region> = pieces(shape[0], &rows)
                .flat_map(|(y, h)| pieces(shape[1], &columns).map(move |(x, w)| ([y, x], [h, w])))
                .map(|(offsets, sizes)| Region::new(offsets, sizes).unwrap())
                .collect();
            if let Some((at, kind)) = change {
                let at = at.index(parts.len());
                let part = parts[at].clone();
                match kind {
                    0 => drop(parts.remove(at)),
                    1 => parts.push(Region::full(shape).unwrap()),
                    2 => parts.push(Region::new([0, 0], [shape[0], 0]).unwrap()),
                    _ => parts.push(Region::new(part.offsets().to_vec(), [1, 1]).unwrap()),
                }
            }
            let mut held = vec![Vec::new(); ranks];
            for (part, (one, other)) in parts.into_iter().zip(deal.into_iter().cycle()) {
                for rank in BTreeSet::from([one, other]) {
                    held[rank].push(part.clone());
                }
            }
            (shape, held)
        },
    )
}

/// Offsets and sizes between the cuts that are inside of `len`.
fn pieces(len: u64, cuts: &BTreeSet<u64>) -> impl Iterator<Item = (u64, u64)> + Clone {
    let mut ends: Vec<u64> = cuts.iter().copied().filter(|cut| *cut < len).collect();
    ends.push(len);
    ends.into_iter()
        .scan(0, |start, end| Some((std::mem::replace(start, end), end - *start)))
        .collect::<Vec<_>>()
        .into_iter()
}

/// Whether distinct chunks hold every element exactly once, or at most once where one rank saves.
fn is_valid((shape, held): &Held) -> bool {
    let distinct: BTreeSet<(Vec<u64>, Vec<u64>)> = held
        .iter()
        .flatten()
        .map(|region| (region.offsets().to_vec(), region.sizes().to_vec()))
        .collect();
    let count = |y: u64, x: u64| {
        let inside = |at: u64, offset: u64, size: u64| (offset..offset + size).contains(&at);
        let holds = |(o, s): &&(Vec<u64>, Vec<u64>)| inside(y, o[0], s[0]) && inside(x, o[1], s[1]);
        distinct.iter().filter(holds).count()
    };
    let several = held.len() > 1;
    let mut elements = (0..shape[0]).flat_map(|y| (0..shape[1]).map(move |x| (y, x)));
    elements.all(|(y, x)| match count(y, x) {
        0 => !several,
        1 => true,
        _ => false,
    })
}

fn planned(locals: &[SavePlan]) -> Result<(Bytes, String), PlanError> {
    let global = DefaultSavePlanner::new().global_plan(locals)?;
    global.check_against(locals, "plain")?;
    Ok((global.metadata.to_wire(), format!("{:?}", global.selections)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn plans_are_refused_exactly_when_an_element_is_lost_or_stored_twice(
        tensors in (1_usize..6).prop_flat_map(|ranks| prop::collection::vec(held(ranks), 1..4)),
        omitted in prop::collection::vec(any::<bool>(), 5),
    ) {
        let ranks = tensors[0].1.len();
        // A tensor of the same shape that is divided alike, and one that may not be.
        let (alike, mut other) = (tensors[0].clone(), tensors[0].clone());
        other.1.rotate_left(1);
        other.1[0].truncate(usize::from(omitted[0]));
        let tensors: Vec<Held> = tensors.into_iter().chain([alike, other]).collect();
        let planner = DefaultSavePlanner::new();
        let mut locals = Vec::new();
        for rank in 0..ranks {
            // Some ranks have other keys: they do not list what they hold nothing of.
            let leaves = tensors.iter().enumerate().filter_map(|(n, (shape, held))| {
                let listed = n == 0 || !omitted[rank] || !held[rank].is_empty();
                listed.then(|| tensor(&format!("t.{n}"), shape, true, held[rank].clone()))
            });
            let state = index(leaves.collect());
            let context = PlanContext::new(rank as u32, ranks as u32);
            let mut local = planner.local_plan(&state, &context).unwrap();
            local.check_against(&state, "plain").unwrap();
            locals.push(local);
        }
        let found = planned(&locals);

        // Plans that were sent, which share what is equal or nothing, give the same.
        let parts: Vec<_> = locals.iter().map(SavePlan::to_parts).collect();
        let summaries: Vec<_> = parts.iter().map(PlanParts::summary).collect();
        let request = PlanRequest::of(&summaries);
        let answers: Vec<_> = (0..).zip(&parts).map(|(rank, parts)| request.answer(rank, parts)).collect();
        let shared = SavePlan::from_answers(&summaries, &answers).unwrap();
        let alone: Result<Vec<_>, _> =
            locals.iter().map(|local| SavePlan::from_wire(&local.to_wire())).collect();
        prop_assert_eq!(&planned(&shared), &found);
        prop_assert_eq!(&planned(&alone.unwrap()), &found);

        let listed = |n: usize| n == 0 || (0..ranks).any(|rank| !omitted[rank] || !tensors[n].1[rank].is_empty());
        let expected = (0..tensors.len()).all(|n| !listed(n) || is_valid(&tensors[n]));
        prop_assert_eq!(found.is_ok(), expected, "{:?}", found.map_err(CheckpointError::from));
    }
}
