//! Planners that say of a state what it is not.

use std::sync::Arc;

use dcp_core::error::PlannerProblem;
use dcp_core::metadata::{ChunkTable, Entry, TensorEntry};
use dcp_core::plan::{GlobalPlan, PlanContext, PlanKey, SavePlan, StateIndex};
use dcp_core::planner::SavePlanner;
use dcp_core::{CheckpointError, DType, Dims, PlanError, Region, StateDict, Tensor, Value};
use dcp_engine::{Saver, Settings};
use dcp_formats::dcp::DcpWriter;
use dcp_planner::DefaultSavePlanner;

use crate::harness::{block_on, memory, on_ranks};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    None,
    DType,
    Shape,
    Region,
    ShortObject,
    LongObject,
    ObjectForTensor,
    MadeUp,
    GlobalDType,
    GlobalShape,
    GlobalTwice,
    GlobalLost,
    LosesLeaf,
    LosesChunk,
    LosesRows,
    Repeats,
    GlobalLosesLeaf,
    GlobalLosesChunk,
    LeavesOut,
}

/// Plans as the default planner does, but for one thing.
#[derive(Debug)]
struct Third {
    lie: Lie,
}

impl SavePlanner for Third {
    fn local_plan(&self, state: &StateIndex, context: &PlanContext) -> Result<SavePlan, PlanError> {
        let honest = DefaultSavePlanner::new().local_plan(state, context)?;
        let mut plan = SavePlan::new();
        for item in honest.items() {
            match (self.lie, item.is_tensor()) {
                (Lie::LosesLeaf | Lie::LeavesOut, false) => continue,
                (Lie::LosesChunk, true) => drop(plan.push_key(item.key.clone())),
                _ => {}
            }
            if self.lie == Lie::LosesChunk && item.is_tensor() {
                continue;
            }
            let mut key = item.key.clone();
            let mut region =
                item.is_tensor().then(|| Region::new(item.offsets, item.sizes).unwrap());
            let mut byte_len = item.byte_len;
            match (self.lie, &mut key.tensor) {
                (Lie::DType, Some(spec)) => spec.dtype = DType::BFloat16,
                (Lie::Shape, Some(spec)) => {
                    spec.shape = Dims::from([2, 2]);
                    region = Some(Region::full([2, 2]).unwrap());
                }
                // The default planner compares what ranks say of a replicated tensor.
                (Lie::Repeats, Some(spec)) => spec.sharded = true,
                (Lie::LosesRows, Some(_)) => {
                    region = Some(Region::new(item.offsets, [item.sizes[0], 3]).unwrap());
                }
                (Lie::Region, Some(_)) => region = Some(Region::new([3, 0], [3, 4]).unwrap()),
                (Lie::ShortObject, None) => byte_len -= 1,
                (Lie::LongObject, None) => byte_len += 1,
                (Lie::ObjectForTensor, tensor) => *tensor = None,
                _ => {}
            }
            let at = plan.push_key(key);
            match region.filter(|_| self.lie != Lie::ObjectForTensor) {
                Some(region) => {
                    plan.push_chunk(at, &region)?;
                    if self.lie == Lie::Repeats {
                        let part = Region::new([1, 0], [1, 4]).unwrap();
                        plan.push_chunk(at, &part)?;
                    }
                }
                None => plan.push_object(at, byte_len)?,
            }
        }
        if self.lie == Lie::MadeUp {
            let key = PlanKey { fqn: "w.made_up".into(), path: None, tensor: None };
            let at = plan.push_key(key);
            plan.push_object(at, 3)?;
        }
        Ok(plan)
    }

    fn global_plan(&self, locals: &[SavePlan]) -> Result<GlobalPlan, PlanError> {
        let planner = DefaultSavePlanner::new().validate(false);
        let mut global = planner.global_plan(locals)?;
        if self.lie == Lie::LeavesOut {
            global.left_out.insert("w.note".into());
        }
        if self.lie == Lie::GlobalLosesLeaf {
            let note = global.metadata.index_of("w.note").unwrap() as u32;
            global.metadata.retain(|fqn, _| fqn != "w.note");
            global.selections.iter_mut().for_each(|all| all.retain(|item| item.entry != note));
        }
        let Some((_, Entry::Tensor(tensor))) = global.metadata.at_mut(0) else {
            return Ok(global);
        };
        match self.lie {
            Lie::GlobalDType => tensor.dtype = DType::BFloat16,
            Lie::GlobalShape => {
                let mut other = TensorEntry::new(tensor.dtype, Dims::from([8, 4]));
                other.chunks = tensor.chunks.clone();
                *tensor = other;
            }
            Lie::GlobalTwice => {
                let again = global.selections[0][0];
                global.selections[0].push(again);
            }
            Lie::GlobalLosesChunk => {
                tensor.chunks = ChunkTable::new(2);
                global.selections.iter_mut().for_each(|all| all.retain(|item| item.entry != 0));
            }
            Lie::GlobalLost => drop(global.selections[0].remove(0)),
            _ => {}
        }
        Ok(global)
    }
}

fn state() -> StateDict {
    let bytes: Vec<u8> = (0..16_u8).flat_map(|x| f32::from(x).to_le_bytes()).collect();
    let w = Tensor::replicated(DType::Float32, [4, 4], bytes).unwrap();
    StateDict::from([("w", Value::Tensor(w)), ("w.note", Value::from("a longer note"))])
}

#[test]
fn a_planner_that_is_not_true_to_the_state_is_refused_before_a_byte_is_written() {
    let lies = [
        (Lie::DType, "bfloat16 [4, 4]"),
        (Lie::Shape, "float32 [2, 2]"),
        (Lie::Region, "[3:6, 0:4]"),
        (Lie::ShortObject, "bytes"),
        (Lie::LongObject, "bytes"),
        (Lie::ObjectForTensor, "an object"),
        (Lie::MadeUp, "not in the state"),
        (Lie::GlobalDType, "bfloat16"),
        (Lie::GlobalShape, "[8, 4]"),
        (Lie::GlobalTwice, "twice"),
        (Lie::GlobalLost, "not written"),
    ];
    for (lie, reported) in lies {
        let storage = memory();
        let saver = Saver::with_settings(Settings::new().save_planner(Arc::new(Third { lie })));
        let saved = block_on(saver.save(&state(), &DcpWriter::new(Arc::clone(&storage))));
        let error = saved.expect_err(&format!("{lie:?}"));
        let CheckpointError::Plan(PlanError::Planner {
            planner,
            fqn,
            problem: PlannerProblem::Untrue { .. },
        }) = &error
        else {
            panic!("{lie:?}: {error}")
        };
        assert_eq!(planner, "Third");
        assert!(fqn.starts_with('w'), "{lie:?}: {error}");
        assert!(error.to_string().contains(reported), "{lie:?}: {error}");
        let listed = futures_util::StreamExt::collect::<Vec<_>>(storage.list(None));
        assert!(block_on(listed).is_empty(), "{lie:?}");
    }
    let honest =
        Saver::with_settings(Settings::new().save_planner(Arc::new(Third { lie: Lie::None })));
    block_on(honest.save(&state(), &DcpWriter::new(memory()))).unwrap();
}

#[test]
fn a_planner_that_loses_or_repeats_what_ranks_hold_is_refused_before_a_byte_is_written() {
    let lies = [
        (Lie::LosesLeaf, "w.note", "all"),
        (Lie::LosesChunk, "w", "[0:4, 0:4]"),
        (Lie::LosesRows, "w", "[0:4, 0:4]"),
        (Lie::Repeats, "w", "[1:2, 0:4]"),
        (Lie::GlobalLosesLeaf, "w.note", "all"),
        (Lie::GlobalLosesChunk, "w", "[0:4, 0:4]"),
    ];
    for (lie, key, region) in lies {
        let storage = memory();
        let saver = Saver::with_settings(Settings::new().save_planner(Arc::new(Third { lie })));
        let saved = block_on(saver.save(&state(), &DcpWriter::new(Arc::clone(&storage))));
        let error = saved.expect_err(&format!("{lie:?}"));
        let CheckpointError::Plan(PlanError::Planner { planner, fqn, problem }) = &error else {
            panic!("{lie:?}: {error}")
        };
        let (PlannerProblem::Lost { part, .. } | PlannerProblem::Repeated { second: part, .. }) =
            problem
        else {
            panic!("{lie:?}: {error}")
        };
        assert_eq!((&**planner, &**fqn, &**part), ("Third", key, region), "{lie:?}: {error}");
        let listed = futures_util::StreamExt::collect::<Vec<_>>(storage.list(None));
        assert!(block_on(listed).is_empty(), "{lie:?}");
    }
    let saver =
        Saver::with_settings(Settings::new().save_planner(Arc::new(Third { lie: Lie::LeavesOut })));
    let summary = block_on(saver.save(&state(), &DcpWriter::new(memory()))).unwrap();
    assert_eq!(summary.entries, 1, "what a planner leaves out on purpose is left out");
}

/// Of a group, what one rank does not offer is stored by another, or missed.
#[test]
fn a_group_misses_what_no_rank_offers() {
    let saved = |lies: [Lie; 2]| {
        let storage = memory();
        on_ranks(2, move |rank, group| {
            let planner = Arc::new(Third { lie: lies[rank as usize] });
            let saver = Saver::with_settings(Settings::in_group(group).save_planner(planner));
            block_on(saver.save(&state(), &DcpWriter::new(Arc::clone(&storage))))
        })
    };
    for lie in [Lie::LosesLeaf, Lie::LosesChunk] {
        assert!(saved([lie, Lie::None]).iter().all(Result::is_ok), "{lie:?}");
        for error in saved([lie, lie]) {
            let text = error.unwrap_err().to_string();
            assert!(text.contains("planner Third does not store"), "{lie:?}: {text}");
        }
    }
}

#[test]
fn every_rank_hears_of_a_planner_that_is_not_true_on_one() {
    let failed = on_ranks(2, |rank, group| {
        let lie = if rank == 1 { Lie::DType } else { Lie::None };
        let saver =
            Saver::with_settings(Settings::in_group(group).save_planner(Arc::new(Third { lie })));
        block_on(saver.save(&state(), &DcpWriter::new(memory())))
    });
    for error in failed {
        let text = error.unwrap_err().to_string();
        assert!(text.contains("rank 1") && text.contains("planner Third"), "{text}");
    }
}
