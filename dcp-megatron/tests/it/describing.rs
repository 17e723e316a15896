//! What is said of a checkpoint's layout is what its files have.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::Storage;
use dcp_jobs::JobOptions;
use dcp_megatron::jobs::{Description, to_torch_dist};
use dcp_megatron::partition::ParallelLayout;
use dcp_megatron::{MegatronCheckpoint, MegatronOpenOptions, MegatronWriter};

use crate::fixtures::OPENED;
use crate::support::{block_on, stored};

fn open(storage: &Arc<dyn Storage>) -> MegatronCheckpoint {
    block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default())).unwrap()
}

fn described(storage: &Arc<dyn Storage>) -> Description {
    block_on(open(storage).describe()).unwrap()
}

fn divided(name: &str, layout: ParallelLayout) -> Arc<dyn Storage> {
    let target: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = MegatronWriter::builder(Arc::clone(&target));
    let checkpoint = open(&stored(name));
    block_on(to_torch_dist(checkpoint.source(), writer, layout, &JobOptions::default())).unwrap();
    target
}

#[test]
fn no_run_saved_otherwise_than_its_arguments_say() {
    // The others were made without a model, under arguments of none.
    let is_model = |name: &str| ["gpt", "run", "moe"].iter().any(|part| name.contains(part));
    for (name, _) in OPENED.iter().filter(|(name, _)| is_model(name)) {
        let found = described(&stored(name));
        assert_eq!(found.parallel_of_args, None, "{name}: {:?}", found.parallel);
    }
    let legacy = described(&stored(crate::legacy::RUN));
    assert_eq!((legacy.parallel.tensor, legacy.parallel_of_args), (Some(2), None));
}

#[test]
fn what_was_divided_anew_is_shown_as_it_is() {
    for (tp, pp) in [(1, 1), (1, 2), (2, 1), (4, 1), (4, 2)] {
        let found = described(&divided("gpt_tp2pp2_swiglu", ParallelLayout::new(tp, pp)));
        let sizes = found.parallel;
        let known = (sizes.tensor, sizes.pipeline, sizes.data, sizes.world);
        assert_eq!(known, (Some(tp.into()), Some(pp.into()), None, None));
        let said = found.parallel_of_args.unwrap();
        assert_eq!((said.tensor, said.pipeline, said.world), (Some(2), Some(2), Some(4)));
    }
    let same = described(&divided("gpt_tp2pp2_swiglu", ParallelLayout::new(2, 2)));
    assert_eq!((same.parallel_of_args, same.parallel.world), (None, Some(4)));
}

#[test]
fn experts_are_counted_apart() {
    for (layout, sizes) in [
        (ParallelLayout::new(1, 1).with_ep(4), [1, 1, 4, 1]),
        (ParallelLayout::new(2, 1).with_ep(2), [2, 1, 2, 2]),
        (ParallelLayout::new(2, 2).with_ep(2).with_etp(1), [2, 2, 2, 1]),
        (ParallelLayout::new(1, 2).with_ep(1).with_etp(2), [1, 2, 1, 2]),
    ] {
        let found = described(&divided("gpt_moe_ep2_swiglu", layout)).parallel;
        let found = [found.tensor, found.pipeline, found.expert, found.expert_tensor];
        assert_eq!(found, sizes.map(Some), "{layout}");
    }
}
