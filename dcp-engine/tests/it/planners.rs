//! Planners that say of a state what it is not.

use std::sync::Arc;

use dcp_core::{
    CheckpointError, DType, Dims, Entry, GlobalPlan, PlanContext, PlanError, PlanKey, Region,
    SavePlan, SavePlanner, StateDict, StateIndex, Tensor, TensorEntry, Value,
};
use dcp_engine::Saver;
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
                (Lie::Region, Some(_)) => region = Some(Region::new([3, 0], [3, 4]).unwrap()),
                (Lie::ShortObject, None) => byte_len -= 1,
                (Lie::LongObject, None) => byte_len += 1,
                (Lie::ObjectForTensor, tensor) => *tensor = None,
                _ => {}
            }
            let at = plan.push_key(key);
            match region.filter(|_| self.lie != Lie::ObjectForTensor) {
                Some(region) => plan.push_chunk(at, &region)?,
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
        let mut global = DefaultSavePlanner::new().global_plan(locals)?;
        let Some((_, Entry::Tensor(tensor))) = global.metadata.at_mut(0) else { panic!("no w") };
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
    for (lie, told) in lies {
        let storage = memory();
        let saver = Saver::new().planner(Arc::new(Third { lie }));
        let saved = block_on(saver.save(&state(), &DcpWriter::new(Arc::clone(&storage))));
        let error = saved.expect_err(&format!("{lie:?}"));
        let CheckpointError::Plan(PlanError::Untrue { planner, fqn, .. }) = &error else {
            panic!("{lie:?}: {error}")
        };
        assert_eq!(planner, "Third");
        assert!(fqn.starts_with('w'), "{lie:?}: {error}");
        assert!(error.to_string().contains(told), "{lie:?}: {error}");
        let listed = futures_util::StreamExt::collect::<Vec<_>>(storage.list(None));
        assert!(block_on(listed).is_empty(), "{lie:?}");
    }
    let honest = Saver::new().planner(Arc::new(Third { lie: Lie::None }));
    block_on(honest.save(&state(), &DcpWriter::new(memory()))).unwrap();
}

#[test]
fn every_rank_hears_of_a_planner_that_is_not_true_on_one() {
    let failed = on_ranks(2, |rank, group| {
        let lie = if rank == 1 { Lie::DType } else { Lie::None };
        let saver = Saver::new().group(group).planner(Arc::new(Third { lie }));
        block_on(saver.save(&state(), &DcpWriter::new(memory())))
    });
    for error in failed {
        let text = error.unwrap_err().to_string();
        assert!(text.contains("rank 1") && text.contains("planner Third"), "{text}");
    }
}
