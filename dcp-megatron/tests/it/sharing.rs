//! Ranks that load together read for each other, and none hangs.

use std::sync::Arc;
use std::time::Duration;

use dcp_collectives::LocalGroup;
use dcp_conformance::CountingStorage;
use dcp_core::error::Phase;
use dcp_core::{CheckpointError, Collective, DType, HostMemory, Key, Storage, TensorView, Value};
use dcp_megatron::parallel::{ParallelReader, ReadSharing};
use dcp_megatron::sharded::{ShardedStateDict, ShardedTensor};
use dcp_megatron::{
    MegatronError, MegatronForm, MegatronLoadOptions, MegatronSaveOptions, load, save,
};

use crate::small_model::{memory, on_ranks, tensors, view};
use crate::support::{block_on, put};

/// A group of replicas, whose members do not wait long.
fn replicas(n: u32) -> Vec<Arc<dyn Collective>> {
    let group = LocalGroup::new(n).deadline(Duration::from_secs(120)).build();
    group.into_iter().map(|collective| Arc::new(collective) as _).collect()
}

fn shared(group: Arc<dyn Collective>, replicas: &Arc<dyn Collective>) -> MegatronLoadOptions {
    let replicas = Arc::clone(replicas);
    MegatronLoadOptions::new().group(group).reader(move |inner| {
        Arc::new(ParallelReader::new(inner, Arc::clone(&replicas)).sharing(ReadSharing::Always))
    })
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
    block_on(save(&weight(0, 1), &storage, &MegatronSaveOptions::new())).unwrap();
    let replicas = replicas(2);
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
}

#[test]
fn what_opens_a_checkpoint_is_read_by_one_rank() {
    for form in [MegatronForm::CommonFile, MegatronForm::CommonInside] {
        let storage = memory();
        let options = MegatronSaveOptions::new().form(form);
        block_on(save(&weight(0, 1), &storage, &options)).unwrap();
        let counts = |ranks: u32| {
            let counted = Arc::new(CountingStorage::new(Arc::clone(&storage)));
            let dynamic: Arc<dyn Storage> = Arc::clone(&counted) as _;
            let replicas = replicas(ranks);
            on_ranks(ranks, |rank, group| {
                let options = shared(group, &replicas[usize::try_from(rank).unwrap()]);
                let loaded = block_on(load(&weight(rank, 0), &dynamic, &options)).unwrap();
                assert_eq!(tensors(&loaded.state)[0].1, [1; 16]);
                assert_eq!(loaded.state.get("iteration").and_then(Value::as_int), Some(7));
            });
            counted.counts()
        };
        let (alone, together) = (counts(1), counts(4));
        assert_eq!((together.reads, together.bytes_read), (alone.reads, alone.bytes_read));
        assert_eq!(together.lists, alone.lists);
        // The others look whether they see the same files.
        assert!(together.stats <= alone.stats + 3 * 4, "{together:?} {alone:?}");
    }
}

/// Of two copies of a checkpoint, the ages differ: each rank reads its own.
#[test]
fn a_rank_that_sees_other_files_reads_them_itself() {
    let places = [1, 2].map(|_| {
        let storage = memory();
        block_on(save(&weight(0, 1), &storage, &MegatronSaveOptions::new())).unwrap();
        let counted = Arc::new(CountingStorage::new(storage));
        (Arc::clone(&counted) as Arc<dyn Storage>, counted)
    });
    on_ranks(2, |rank, group| {
        let (storage, _) = &places[usize::try_from(rank).unwrap()];
        let loaded =
            block_on(load(&weight(rank, 0), storage, &MegatronLoadOptions::new().group(group)));
        assert_eq!(tensors(&loaded.unwrap().state)[0].1, [1; 16]);
    });
    let index = Key::new(".metadata").unwrap();
    for (_, counted) in places {
        assert!(counted.requests(&index) >= 1);
    }
}

#[test]
fn all_ranks_are_told_why_the_one_that_reads_cannot() {
    let storage = memory();
    block_on(save(&weight(0, 1), &storage, &MegatronSaveOptions::new())).unwrap();
    put(&*storage, ".metadata", b"none at all".to_vec());
    let replicas = replicas(3);
    on_ranks(3, |rank, group| {
        let options = shared(group, &replicas[usize::try_from(rank).unwrap()]);
        let error = block_on(load(&weight(rank, 0), &storage, &options)).unwrap_err();
        let MegatronError::Checkpoint(CheckpointError::Ranks { phase, failures }) = &error else {
            panic!("{error}")
        };
        let [failure] = &**failures else { panic!("{error}") };
        assert_eq!((*phase, failure.rank), (Phase::Open, 0));
        assert!(failure.message.contains(".metadata"), "{error}");
    });
}
