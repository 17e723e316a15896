//! Any layout saved, any other layout loaded: every element comes back, each moved once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use dcp_core::plan::{PlanContext, SavePlan};
use dcp_core::planner::{LoadPlanner, SavePlanner};
use dcp_core::{Dims, Region};
use dcp_planner::mesh::{DeviceMesh, TensorPlacement, chunk_along, local_regions, longest_axis};
use dcp_planner::{DedupPolicy, DefaultLoadPlanner, DefaultSavePlanner, validate_metadata};
use proptest::prelude::*;
use support::{elements, index, load, object, save, tensor, whole};

/// A mesh and placements on it.
#[derive(Clone, Debug)]
struct Layout {
    mesh: Vec<u64>,
    placements: Vec<TensorPlacement>,
}

impl Layout {
    fn world(&self) -> u32 {
        DeviceMesh::new(self.mesh.clone()).unwrap().world_size()
    }

    fn regions(&self, shape: &[u64], rank: u32) -> Vec<Region> {
        let mesh = DeviceMesh::new(self.mesh.clone()).unwrap();
        let coordinate = mesh.coordinate(rank).unwrap();
        assert_eq!(mesh.rank(&coordinate), Some(rank));
        local_regions(shape, &mesh, &coordinate, &self.placements).unwrap()
    }
}

fn layouts(ndim: usize) -> impl Strategy<Value = Layout> {
    let placement = prop_oneof![
        1 => Just(TensorPlacement::Replicate),
        3 => (0..ndim).prop_map(TensorPlacement::Shard),
        1 => (0..ndim, 1_u64..4).prop_map(|(axis, split_factor)| TensorPlacement::StridedShard {
            axis,
            split_factor
        }),
    ];
    prop::collection::vec((1_u64..4, placement), 0..4).prop_map(|axes| {
        let (mesh, placements) = axes.into_iter().unzip();
        Layout { mesh, placements }
    })
}

fn cases() -> impl Strategy<Value = (Vec<u64>, Layout, Layout)> {
    prop::collection::vec(0_u64..9, 1..4).prop_flat_map(|shape| {
        let ndim = shape.len();
        (Just(shape), layouts(ndim), layouts(ndim))
    })
}

fn policies() -> impl Strategy<Value = DedupPolicy> {
    prop_oneof![
        Just(DedupPolicy::Balanced),
        Just(DedupPolicy::TorchCompatible),
        Just(DedupPolicy::LowestRank)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// Together the ranks hold every element equally often.
    #[test]
    fn placements_make_whole_tensors((shape, layout, _) in cases()) {
        let total: u64 = shape.iter().product();
        let mut held = vec![0_u64; usize::try_from(total).unwrap()];
        for rank in 0..layout.world() {
            for region in layout.regions(&shape, rank) {
                for element in elements(&region, &shape) {
                    held[element as usize] += 1;
                }
            }
        }
        let copies = layout.mesh.iter().zip(&layout.placements);
        let copies: u64 =
            copies.filter(|(_, p)| **p == TensorPlacement::Replicate).map(|(n, _)| n).product();
        prop_assert!(held.iter().all(|n| *n == copies), "{held:?} instead of {copies}");
    }

    #[test]
    fn what_is_saved_in_one_layout_loads_in_another(
        (shape, saved, wanted) in cases(),
        policy in policies(),
    ) {
        let planner = DefaultSavePlanner::new().dedup(policy);
        let world = saved.world();
        let locals: Vec<SavePlan> = (0..world)
            .map(|rank| {
                let state = index(vec![
                    tensor("w", &shape, true, saved.regions(&shape, rank)),
                    object("step", 5),
                    tensor("norm", &[3], false, vec![whole(&[3])]),
                ]);
                let plan = planner.local_plan(&state, &PlanContext::new(rank, world)).unwrap();
                SavePlan::from_wire(&plan.to_wire()).unwrap()
            })
            .collect();
        let mut global = planner.global_plan(&locals).unwrap();
        let stored = save(&locals, &mut global);
        prop_assert!(validate_metadata(&global.metadata).is_empty());

        let whole_tensor = vec![whole(&shape)];
        let by_rank = (0..wanted.world()).map(|rank| wanted.regions(&shape, rank));
        for regions in by_rank.chain([whole_tensor]) {
            let state = index(vec![
                tensor("w", &shape, true, regions.clone()),
                object("step", 0),
                tensor("norm", &[3], false, vec![whole(&[3])]),
            ]);
            let (plan, report) = DefaultLoadPlanner::new()
                .local_plan(&state, &global.metadata, &PlanContext::solo())
                .unwrap();
            prop_assert!(report.is_complete() && report.unexpected.is_empty(), "{report}");
            let memory = load(&plan, &state, &global.metadata, &stored);
            for ((fqn, shard), data) in memory {
                let expected = match &*fqn {
                    "w" => elements(&regions[shard], &shape),
                    _ => vec![0, 1, 2],
                };
                let data: Option<Vec<u32>> = data.into_iter().collect();
                prop_assert_eq!(data, Some(expected));
            }
        }
    }

    /// Random boxes are stored; any request returns the right elements, and the rest is counted.
    #[test]
    fn gaps_are_counted_exactly(
        shape in prop::array::uniform2(1_u64..12),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..2, 1_u64..12), 0..24),
        drop in any::<u32>(),
        wanted in prop::collection::vec((prop::array::uniform2(0_u64..12), prop::array::uniform2(0_u64..12)), 1..6),
    ) {
        let mut boxes = vec![whole(&shape)];
        for (which, axis, at) in cuts {
            let at_box = which.index(boxes.len());
            let cut = boxes[at_box].clone();
            let first = at % cut.sizes()[axis];
            if first > 0 {
                let (mut low, mut high) = (cut.sizes().clone(), cut.sizes().clone());
                low[axis] = first;
                high[axis] -= first;
                let mut start = cut.offsets().clone();
                boxes[at_box] = Region::new(start.clone(), low).unwrap();
                start[axis] += first;
                boxes.push(Region::new(start, high).unwrap());
            }
        }
        let kept: Vec<_> = boxes
            .into_iter()
            .enumerate()
            .filter(|(n, _)| drop >> (n % 32) & 1 == 0)
            .map(|(_, region)| region)
            .collect();
        let planner = DefaultSavePlanner::new().validate(false);
        let state = index(vec![tensor("w", &shape, true, kept.clone())]);
        let locals = [planner.local_plan(&state, &PlanContext::solo()).unwrap()];
        let mut global = planner.global_plan(&locals).unwrap();
        let stored = save(&locals, &mut global);
        if kept.is_empty() {
            return Ok(());
        }
        let clip = |(offsets, sizes): &([u64; 2], [u64; 2])| {
            let offsets: Dims = offsets.iter().zip(&shape).map(|(o, n)| *o.min(n)).collect();
            let sizes: Dims =
                sizes.iter().zip(&*offsets).zip(&shape).map(|((s, o), n)| *s.min(&(n - o))).collect();
            Region::new(offsets, sizes).unwrap()
        };
        let regions: Vec<_> = wanted.iter().map(clip).collect();
        let state = index(vec![tensor("w", &shape, true, regions.clone())]);
        let (plan, report) = DefaultLoadPlanner::new()
            .local_plan(&state, &global.metadata, &PlanContext::solo())
            .unwrap();
        let mut absent = 0;
        for ((_, shard), data) in load(&plan, &state, &global.metadata, &stored) {
            for (found, expected) in data.iter().zip(elements(&regions[shard], &shape)) {
                absent += u64::from(found.is_none());
                prop_assert!(found.is_none_or(|found| found == expected));
            }
        }
        prop_assert_eq!(report.uncovered.iter().map(|(_, n)| n).sum::<u64>(), absent);
    }

    /// The parts of a group are disjoint, whole, and in order.
    #[test]
    fn consecutive_parts_make_the_whole(shape in prop::collection::vec(0_u64..20, 1..4), parts in 1_u32..9) {
        for axis in [0, longest_axis(&shape).unwrap()] {
            let parts: Vec<_> =
                (0..parts).filter_map(|part| chunk_along(&shape, axis, parts, part)).collect();
            let mut next = 0;
            for part in &parts {
                prop_assert_eq!(part.offsets()[axis], next);
                next = part.end(axis);
            }
            prop_assert_eq!(next, if parts.is_empty() { 0 } else { shape[axis] });
            prop_assert!(!parts.is_empty() || shape[axis] == 0);
        }
    }
}
