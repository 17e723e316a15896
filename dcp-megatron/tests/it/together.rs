//! Saves and loads of sharded state dicts whose replicas share the work, and saves beside training.

use std::sync::Arc;

use dcp_conformance::FaultStorage;
use dcp_core::{CheckpointError, DType, HostMemory, Storage, TensorView};
use dcp_megatron::parallel::{Exchange, ParallelReader, ParallelSave, ReadSharing, ShareRule};
use dcp_megatron::sharded::{ShardedStateDict, ShardedTensor};
use dcp_megatron::{
    AsyncCallsQueue, AsyncRequest, MegatronBackgroundSaver, MegatronError, MegatronLoadOptions,
    MegatronRun, MegatronSaveOptions, StrictHandling, Tracked, async_save, load, save,
    write_tracker,
};

use crate::ranks::{Mesh, on_mesh};
use crate::small_model::{Fill, Layout, held, memory, model, rng, tensors};
use crate::support::{block_on, get, names};

fn at(mesh: &Mesh) -> Layout {
    Layout::of(mesh.rank.into(), 2, 1)
}

/// Loads the model on TP2 x DP2, the replicas together, and returns what each rank has read.
fn load_together(storage: &Arc<dyn Storage>, exchange: Exchange) -> Vec<u64> {
    on_mesh(2, 2, |mesh| {
        let request = model(at(&mesh), Fill::Zeros);
        let (rank, replicas) = (mesh.rank, Arc::clone(&mesh.replicas));
        let options = MegatronLoadOptions::new()
            .group(Arc::clone(&mesh.world))
            .strict(StrictHandling::RaiseUnexpected)
            .reader(move |inner| {
                let reader =
                    ParallelReader::new(inner, Arc::clone(&replicas)).sharing(ReadSharing::Always);
                Arc::new(reader.world_rank(rank).exchange(exchange))
            });
        let loaded = block_on(load(&request, storage, &options)).unwrap();
        let expected = held(&model(at(&mesh), Fill::Model));
        assert_eq!(tensors(&loaded.state), expected, "rank {rank}");
        assert_eq!(held(&request), expected, "rank {rank}: in place");
        loaded.read.bytes_read
    })
}

/// What ranks of one replica read by themselves.
fn load_alone(storage: &Arc<dyn Storage>) -> u64 {
    let read = on_mesh(2, 1, |mesh| {
        let request = model(at(&mesh), Fill::Nothing);
        let options = MegatronLoadOptions::new().group(mesh.world.clone());
        block_on(load(&request, storage, &options)).unwrap().read.bytes_read
    });
    read.into_iter().sum()
}

#[test]
fn replicas_share_the_work_of_a_save_and_of_a_load() {
    for rule in [ShareRule::Megatron, ShareRule::Balanced] {
        let storage = memory();
        on_mesh(2, 2, |mesh| {
            let mut state = model(at(&mesh), Fill::Model);
            state.insert("rng_state", rng(at(&mesh)));
            let share = ParallelSave::new(mesh.replicas.clone()).world_rank(mesh.rank).rule(rule);
            let options = MegatronSaveOptions::new()
                .group(mesh.world.clone())
                .overwrite(true)
                .distribution(Arc::new(share));
            let first = block_on(save(&state, &storage, &options)).unwrap();
            // What was shared out is remembered, and so is the plan of the save.
            let again = block_on(save(&state, &storage, &options)).unwrap();
            assert_eq!(first.bytes_written, again.bytes_written);
            assert_eq!(first.files, 4, "every rank writes");
        });
        let lens: Vec<usize> = names(&*storage)
            .into_iter()
            .filter(|name| name.ends_with(".distcp"))
            .map(|name| get(&*storage, &name).unwrap().len())
            .collect();
        assert_eq!(lens.len(), 4, "the first save was replaced");
        let (least, most) = (lens.iter().min().unwrap(), lens.iter().max().unwrap());
        assert!(most - least < most / 3, "{rule:?}: {lens:?}");
        let alone = load_alone(&storage);
        for exchange in [Exchange::Broadcast, Exchange::GatherRounds] {
            let read = load_together(&storage, exchange);
            assert!(read.iter().all(|bytes| *bytes > 0), "{read:?}");
            assert!(read.iter().sum::<u64>() <= alone, "{read:?} instead of {alone} bytes");
        }
    }
}

/// Rank 3's storage dies at any of its operations.
#[test]
fn a_replica_that_cannot_read_fails_the_load_on_all_ranks() {
    let storage = memory();
    on_mesh(2, 1, |mesh| {
        let options = MegatronSaveOptions::new().group(mesh.world.clone());
        block_on(save(&model(at(&mesh), Fill::Model), &storage, &options)).unwrap();
    });
    for operations in 0.. {
        let results = on_mesh(2, 2, |mesh| {
            let mine: Arc<dyn Storage> = match mesh.rank {
                3 => Arc::new(FaultStorage::new(Arc::clone(&storage)).dying_after(operations)),
                _ => Arc::clone(&storage),
            };
            let (rank, replicas) = (mesh.rank, Arc::clone(&mesh.replicas));
            let options =
                MegatronLoadOptions::new().group(mesh.world.clone()).reader(move |inner| {
                    Arc::new(
                        ParallelReader::new(inner, Arc::clone(&replicas))
                            .sharing(ReadSharing::Always)
                            .world_rank(rank),
                    )
                });
            let request = model(at(&mesh), Fill::Zeros);
            block_on(load(&request, &mine, &options)).map(|_| ())
        });
        if results.iter().all(Result::is_ok) {
            assert!(operations > 4, "{operations}");
            break;
        }
        for result in results {
            let error = result.unwrap_err();
            let MegatronError::Checkpoint(CheckpointError::Ranks { failures, .. }) = &error else {
                panic!("{error}")
            };
            assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [3]);
        }
    }
}

#[test]
fn a_save_beside_training_shares_the_work_and_moves_the_tracker_last() {
    let run = memory();
    let folder = MegatronRun::new(Arc::clone(&run)).checkpoint(Tracked::Iteration(7)).unwrap();
    let writers = dcp_collectives::LocalCollective::group(4);
    let writers: Vec<Arc<dyn dcp_core::Collective>> =
        writers.into_iter().map(|group| Arc::new(group) as _).collect();
    let queues = dcp_collectives::LocalCollective::group(4);
    let queues: Vec<Arc<dyn dcp_core::Collective>> =
        queues.into_iter().map(|group| Arc::new(group) as _).collect();
    on_mesh(2, 2, |mesh| {
        let state = model(at(&mesh), Fill::Model);
        let rank = mesh.rank as usize;
        block_on(async {
            let background = MegatronBackgroundSaver::new(Some(Arc::clone(&writers[rank])));
            let mut queue = AsyncCallsQueue::new(Some(Arc::clone(&queues[rank])));
            let share = ParallelSave::new(mesh.replicas.clone()).world_rank(mesh.rank);
            let options =
                MegatronSaveOptions::new().group(mesh.world.clone()).distribution(Arc::new(share));
            let pending = async_save(&state, &folder, &options, &background).await.unwrap();
            let mut request = AsyncRequest::started(pending);
            if rank == 0 {
                let run = Arc::clone(&run);
                request.add_finalize_fn(async move || {
                    write_tracker(&*run, Tracked::Iteration(7)).await
                });
            }
            queue.schedule_async_request(request).await.unwrap();
            assert_eq!(queue.close().await.unwrap(), [1]);
        });
    });
    // The folder of the run: what its tracker names is opened.
    let alone = on_mesh(2, 1, |mesh| {
        let request = model(at(&mesh), Fill::Nothing);
        let options = MegatronLoadOptions::new().group(mesh.world.clone());
        let loaded = block_on(load(&request, &run, &options)).unwrap();
        tensors(&loaded.state) == held(&model(at(&mesh), Fill::Model))
    });
    assert_eq!(alone, [true, true]);
}

/// The others do not begin to write, and so have nothing to wait for.
#[test]
fn a_rank_that_cannot_copy_its_state_fails_the_background_save_on_all() {
    let storage = memory();
    let writers = dcp_collectives::LocalCollective::group(2);
    let writers: Vec<Arc<dyn dcp_core::Collective>> =
        writers.into_iter().map(|group| Arc::new(group) as _).collect();
    on_mesh(2, 1, |mesh| {
        let memory = HostMemory::zeroed(8);
        let view = TensorView::contiguous(memory.clone(), DType::UInt8, [8], 0).unwrap();
        let weight = ShardedTensor::from_rank_offsets("w", view)
            .offset(0, mesh.rank.into(), 2)
            .build()
            .unwrap();
        let state = ShardedStateDict::from([("w", weight)]);
        let options = MegatronSaveOptions::new().group(mesh.world.clone());
        let writer = Arc::clone(&writers[mesh.rank as usize]);
        block_on(async {
            let background = MegatronBackgroundSaver::new(Some(writer));
            let lent = (mesh.rank == 1).then(|| memory.lend(0..8).unwrap());
            let error = async_save(&state, &storage, &options, &background).await.unwrap_err();
            let MegatronError::Checkpoint(CheckpointError::Ranks { failures, .. }) = &error else {
                panic!("{error}")
            };
            assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [1]);
            drop(lent);
            let pending = async_save(&state, &storage, &options, &background).await.unwrap();
            pending.wait().await.unwrap();
        });
    });
}
