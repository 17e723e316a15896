//! What ranks that load together read for each other, and that none waits in vain.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_collectives::LocalCollective;
use dcp_core::{CheckpointError, Collective, DType, HostMemory, TensorView, Value};
use dcp_megatron::parallel::ParallelReader;
use dcp_megatron::sharded::{ShardedStateDict, ShardedTensor};
use dcp_megatron::{LoadOptions, MegatronError, SaveOptions, load, save};

use crate::small_model::{memory, on_ranks, view};
use crate::support::block_on;

/// A group of replicas, whose members do not wait long.
fn replicas(n: u32) -> Vec<Arc<dyn Collective>> {
    let group = LocalCollective::builder(n).deadline(Duration::from_secs(20)).build();
    group.into_iter().map(|collective| Arc::new(collective) as _).collect()
}

fn shared(group: Arc<dyn Collective>, replicas: &Arc<dyn Collective>) -> LoadOptions {
    let replicas = Arc::clone(replicas);
    LoadOptions::new()
        .group(group)
        .reader(move |inner| Arc::new(ParallelReader::new(inner, Arc::clone(&replicas))))
}

fn weight(rank: u64, byte: u8) -> ShardedStateDict {
    let weight = ShardedTensor::from_rank_offsets("w", view(&[4], vec![byte; 16]));
    let mut state = ShardedStateDict::from([("w", weight.replica_id(rank).build().unwrap())]);
    state.insert("iteration", Value::Int(7));
    state
}

#[test]
fn memory_that_cannot_be_cleared_on_one_rank_ends_the_load_on_all() {
    let storage = memory();
    block_on(save(&weight(0, 1), &storage, &SaveOptions::new())).unwrap();
    let replicas = replicas(2);
    let begun = Instant::now();
    on_ranks(2, |rank, group| {
        let memory = HostMemory::zeroed(24);
        let longer = TensorView::contiguous(memory.clone(), DType::Int32, [6], 0).unwrap();
        let longer = ShardedTensor::from_rank_offsets("w", longer)
            .allow_shape_mismatch(true)
            .replica_id(rank)
            .build()
            .unwrap();
        let in_use = (rank == 1).then(|| memory.read().unwrap());
        let request = ShardedStateDict::from([("w", longer)]);
        let options = shared(group, &replicas[usize::try_from(rank).unwrap()]);
        let error = block_on(load(&request, &storage, &options)).unwrap_err();
        drop(in_use);
        let MegatronError::Checkpoint(CheckpointError::Ranks { failures, .. }) = &error else {
            panic!("{error}")
        };
        let [failure] = &**failures else { panic!("{error}") };
        assert_eq!(failure.rank, 1);
        assert!(failure.message.contains("\"w\""), "{error}");
    });
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}
