//! Replicas share the work of a save.

use std::sync::Arc;
use std::time::Duration;

use dcp_collectives::TcpConfig;
use dcp_conformance::{CollectiveFault, CountingStorage, FaultCollective, MemoryStorage};
use dcp_core::{
    CheckpointError, Collective, DType, StateDict, Storage, StorageReader as _, Tensor, Value,
};
use dcp_engine::{Loader, Settings};
use dcp_formats::dcp::DcpReader;
use dcp_megatron::MegatronError;
use dcp_megatron::parallel::{
    DistributionOrigin, Exchange, ParallelReader, ParallelSave, ReadSharing, Redistribution,
    ShareRule,
};
use dcp_megatron::sharded::{LocalTensor, ShardedTensor};

use crate::ranks::{on_boxed_ranks, on_mesh};
use crate::support::{block_on, fixture, get, in_memory, names, put};

fn redistribute(
    save: &ParallelSave,
    tensors: &mut [ShardedTensor],
) -> Result<Redistribution, MegatronError> {
    block_on(save.redistribute(tensors.iter_mut().collect()))
}

/// Which of the tensors are main replicas.
fn main(tensors: &[ShardedTensor]) -> Vec<bool> {
    tensors.iter().map(|tensor| tensor.replica_id().is_main()).collect()
}

/// A tensor of `bytes` bytes that is the same on all data-parallel ranks.
fn replica(key: &str, bytes: u64, dp_rank: u32) -> ShardedTensor {
    ShardedTensor::from_rank_offsets(key, LocalTensor::described(DType::UInt8, [bytes]))
        .replica_id((0, 0, dp_rank.into()))
        .build()
        .unwrap()
}

fn replicas(dp_rank: u32) -> Vec<ShardedTensor> {
    [("a", 9000), ("b", 6000), ("c", 5000), ("d", 4000)]
        .map(|(key, bytes)| replica(key, bytes, dp_rank))
        .into()
}

/// What Megatron-Core 0.16.1 wrote on TP2 x DP2 with `FullyParallelSaveStrategyWrapper`: the names
/// of the files say which rank wrote what.
#[test]
fn the_rule_of_megatron_gives_every_shard_to_the_rank_that_wrote_it() {
    let storage = in_memory(&fixture("gpt_tp2dp2_fully_reshardable").join("ckpt"));
    let metadata = block_on(DcpReader::new(storage).metadata()).unwrap();
    let (mut seen, mut later) = (0, 0);
    for tp in 0..2 {
        // What this tensor-parallel rank has, and which of its two replicas wrote it.
        let mut shards = Vec::new();
        for (fqn, entry) in metadata.iter() {
            let Some(tensor) = entry.as_tensor() else { continue };
            for chunk in tensor.chunks.iter() {
                let file = metadata.file(chunk.placement.unwrap().file).unwrap().to_string();
                let rank: u32 = file[2..].split('_').next().unwrap().parse().unwrap();
                if rank % 2 == tp {
                    let region = chunk.region().unwrap();
                    shards.push((fqn, tensor, region, rank / 2));
                }
            }
        }
        let written: Vec<u32> = shards.iter().map(|(.., dp_rank)| *dp_rank).collect();
        seen += written.len();
        later += written.iter().filter(|dp_rank| **dp_rank == 1).count();
        let owned = on_boxed_ranks(2, |dp_rank, group| {
            let mut mine: Vec<_> = shards
                .iter()
                .map(|(fqn, tensor, region, _)| {
                    let local = LocalTensor::described(tensor.dtype, region.sizes().clone());
                    ShardedTensor::builder(
                        (*fqn).clone(),
                        local,
                        tensor.shape.clone(),
                        region.offsets().clone(),
                    )
                    .replica_id((0, 0, dp_rank.into()))
                    .build()
                    .unwrap()
                })
                .collect();
            let save = ParallelSave::new(group.into()).rule(ShareRule::Megatron);
            redistribute(&save, &mut mine).unwrap();
            main(&mine)
        });
        for (dp_rank, owned) in (0..).zip(owned) {
            let expected: Vec<bool> = written.iter().map(|writer| *writer == dp_rank).collect();
            assert_eq!(owned, expected, "replica {dp_rank} of tensor-parallel rank {tp}");
        }
    }
    assert_eq!((seen, later), (60, 30), "half of it was written by the second replica");
}

#[test]
fn one_replica_of_each_shard_becomes_the_main_one() {
    let results = on_boxed_ranks(3, |rank, group| {
        let mut tensors = replicas(rank);
        // Only the first two have it; and another group writes the last one.
        tensors.truncate(if rank == 2 { 3 } else { 4 });
        tensors.push(replica("elsewhere", 700, rank + 1));
        let done = redistribute(&ParallelSave::new(group.into()), &mut tensors).unwrap();
        let owned: Vec<String> = tensors
            .iter()
            .filter(|tensor| tensor.replica_id().is_main())
            .map(|tensor| tensor.key().to_string())
            .collect();
        assert_eq!(done.origin, DistributionOrigin::Exchange);
        assert_eq!(done.shards, owned.len() as u64);
        assert!(tensors.iter().all(|tensor| matches!(tensor.replica_id().parts(), [0 | 1])));
        (owned, done.byte_len)
    });
    let share =
        |keys: &[&str], bytes| (keys.iter().map(ToString::to_string).collect::<Vec<_>>(), bytes);
    assert_eq!(results, [share(&["c", "d"], 9000), share(&["a"], 9000), share(&["b"], 6000)]);
}

#[test]
fn a_rank_alone_keeps_its_replica_ids() {
    let results = on_boxed_ranks(1, |_, group| {
        let mut tensors = vec![replica("a", 5, 0), replica("b", 6, 3)];
        let done = redistribute(&ParallelSave::new(group.into()), &mut tensors).unwrap();
        assert_eq!(tensors[1].replica_id().parts(), [0, 0, 3]);
        (done.origin, done.shards, done.byte_len)
    });
    assert_eq!(results, [(DistributionOrigin::Alone, 1, 5)]);
}

/// Megatron-Core with `do_cache_distribution` would write "new" nowhere.
#[test]
fn what_is_remembered_holds_only_while_nothing_changes() {
    let results = on_boxed_ranks(3, |rank, group| {
        let save = ParallelSave::new(group.into());
        let mut origins = Vec::new();
        let mut owned = Vec::new();
        for round in 0..6 {
            let mut tensors = replicas(rank);
            if round >= 2 {
                tensors.push(replica("new", 100, rank));
            }
            if round == 4 && rank == 1 {
                // One rank is enough.
                tensors.pop();
            }
            origins.push(redistribute(&save, &mut tensors).unwrap().origin);
            owned.push(main(&tensors));
        }
        (origins, owned)
    });
    use DistributionOrigin::{Exchange, Memory};
    for round in 0..6 {
        let expected = [Exchange, Memory, Exchange, Memory, Exchange, Exchange][round];
        assert!(results.iter().all(|(origins, _)| origins[round] == expected), "{round}");
        for shard in 0..if round < 2 { 4 } else { 5 } {
            let owners = results.iter().filter(|(_, owned)| owned[round].get(shard) == Some(&true));
            assert_eq!(owners.count(), 1, "shard {shard} in round {round}");
        }
    }
}

/// Weights now and then, everything from time to time.
#[test]
fn two_kinds_of_saves_are_remembered() {
    let origins = on_boxed_ranks(2, |rank, group| {
        let save = ParallelSave::new(group.into());
        let kinds = [4, 2, 4, 2, 4, 1, 4, 2].map(|shards| {
            let mut tensors = replicas(rank);
            tensors.truncate(shards);
            redistribute(&save, &mut tensors).unwrap().origin
        });
        kinds.map(|origin| origin == DistributionOrigin::Memory)
    });
    assert_eq!(origins[0], [false, false, true, true, true, false, false, false]);
    assert_eq!(origins[0], origins[1]);
}

/// One process after the other: each begins with nothing but what is on disk.
#[test]
fn what_is_on_disk_serves_later_processes_and_damage_does_not_matter() {
    let cache: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let process = |rule, more: u64| {
        let results = on_boxed_ranks(2, |rank, group| {
            let mut tensors = replicas(rank);
            tensors.push(replica("more", more, rank));
            let save = ParallelSave::new(group.into())
                .rule(rule)
                .cache_in(Arc::clone(&cache), 10 + 2 * rank);
            (redistribute(&save, &mut tensors).unwrap().origin, main(&tensors))
        });
        assert_eq!(results[0].0, results[1].0);
        for shard in 0..5 {
            assert_eq!(results.iter().filter(|(_, owned)| owned[shard]).count(), 1);
        }
        (results[0].0, results[0].1.clone())
    };
    let (origin, first) = process(ShareRule::Balanced, 50);
    assert_eq!(origin, DistributionOrigin::Exchange);
    assert_eq!(names(&*cache), ["distribution_00010.dcp"]);
    assert_eq!(process(ShareRule::Balanced, 50), (DistributionOrigin::Disk, first));
    assert_eq!(process(ShareRule::Megatron, 50).0, DistributionOrigin::Exchange, "another rule");
    assert_eq!(process(ShareRule::Megatron, 51).0, DistributionOrigin::Exchange, "another size");
    assert_eq!(process(ShareRule::Megatron, 51).0, DistributionOrigin::Disk);
    let mut bytes = get(&*cache, "distribution_00010.dcp").unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    put(&*cache, "distribution_00010.dcp", bytes);
    assert_eq!(process(ShareRule::Megatron, 51).0, DistributionOrigin::Exchange, "damaged");
    assert_eq!(process(ShareRule::Megatron, 51).0, DistributionOrigin::Disk, "written again");
}

#[test]
fn ranks_that_disagree_fail_together_and_change_nothing() {
    let results = on_boxed_ranks(3, |rank, group| {
        let mut tensors = replicas(rank);
        if rank == 2 {
            tensors[1] = replica("b", 6001, rank);
        }
        let save = ParallelSave::new(group.into()).world_rank(rank * 4);
        let error = redistribute(&save, &mut tensors).unwrap_err();
        assert_eq!(main(&tensors), [rank == 0; 4]);
        error.to_string()
    });
    assert!(results.iter().all(|error| *error == results[0]), "{results:?}");
    assert!(results[0].contains("\"b\" is 6000 bytes long"), "{}", results[0]);
}

#[test]
fn flattened_shards_are_refused_on_the_rank_that_has_them() {
    let results = on_boxed_ranks(2, |rank, group| {
        let mut tensors = replicas(rank);
        if rank == 1 {
            let local = LocalTensor::described(DType::UInt8, [20]);
            let flat = ShardedTensor::from_rank_offsets("flat", local);
            tensors.push(flat.flattened_range(0..20, [4, 5]).build().unwrap());
        }
        let save = ParallelSave::new(group.into()).world_rank(rank + 6);
        redistribute(&save, &mut tensors).unwrap_err()
    });
    for error in results {
        let MegatronError::Checkpoint(CheckpointError::Ranks { failures, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!(failures.len(), 1);
        assert_eq!(failures[0].rank, 7, "as the whole job counts");
        assert!(failures[0].message.contains("\"flat\""), "{}", failures[0].message);
    }
}

#[test]
fn nobody_waits_for_a_dead_rank() {
    for dying in [0, 2] {
        for operation in 1..5 {
            let results = on_boxed_ranks(3, |rank, group| {
                let group: Arc<dyn Collective> = if rank == dying {
                    Arc::new(FaultCollective::new(group, operation, CollectiveFault::Die))
                } else {
                    group.into()
                };
                redistribute(&ParallelSave::new(group), &mut replicas(rank)).map(|_| ())
            });
            assert!(results[dying as usize].is_err(), "rank {dying} at {operation}");
            // The last message of a rank that dies afterwards may still reach the others.
            let all = results.iter().all(Result::is_err);
            assert!(all || operation == 4, "rank {dying} at {operation}: {results:?}");
            for error in results.iter().filter_map(|result| result.as_ref().err()) {
                let text = dcp_core::error::error_chain(error);
                assert!(!text.contains("did not answer"), "a rank waited for its deadline: {text}");
            }
        }
    }
}

#[test]
fn ranks_may_be_processes_apart() {
    let (listener, port) = dcp_testing::listener();
    let mut listener = Some(listener);
    let owned: Vec<Vec<bool>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let patient = Duration::from_secs(120);
                let mut config = TcpConfig::new(rank, 3, dcp_testing::loopback().to_string(), port)
                    .deadline(patient)
                    .connect_timeout(patient);
                if let Some(listener) = listener.take() {
                    config = config.listener(listener);
                }
                scope.spawn(move || {
                    let save = ParallelSave::new(Arc::new(config.connect().unwrap()));
                    let mut tensors = replicas(rank);
                    redistribute(&save, &mut tensors).unwrap();
                    let first = main(&tensors);
                    let mut tensors = replicas(rank);
                    let again = redistribute(&save, &mut tensors).unwrap();
                    assert_eq!(again.origin, DistributionOrigin::Memory);
                    assert_eq!(main(&tensors), first);
                    first
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for shard in 0..4 {
        assert_eq!(owned.iter().filter(|owned| owned[shard]).count(), 1);
    }
}

/// A checkpoint of Megatron-Core on the ranks that wrote it, each with what it had: every byte is
/// read once among the replicas, and the replicas get the same.
#[test]
fn replicas_read_a_real_checkpoint_once_among_them() {
    let storage = in_memory(&fixture("gpt_tp2dp2_fully_reshardable").join("ckpt"));
    let metadata = block_on(DcpReader::new(Arc::clone(&storage) as _).metadata()).unwrap();
    let request = |tp_rank: u32| {
        let mut state = StateDict::new();
        for (fqn, entry) in metadata.iter() {
            let Some(tensor) = entry.as_tensor() else { continue };
            let chunks = tensor.chunks.iter();
            // Tensors cut in two by tensor parallelism; the rest is whole on every rank.
            let cut = tensor.chunks.len() > 1;
            let mine = chunks.zip(0..).filter(|(_, at)| !cut || at % 2 == tp_rank);
            let regions: Vec<_> = mine.map(|(chunk, _)| chunk.region().unwrap()).collect();
            let zeros = Tensor::zeros_sharded(tensor.dtype, tensor.shape.clone(), regions);
            state.insert(&**fqn, zeros.unwrap());
        }
        state
    };
    let alone: Vec<(StateDict, u64)> = (0..2)
        .map(|tp_rank| {
            let counted = CountingStorage::new(Arc::clone(&storage) as _);
            let reader = DcpReader::new(Arc::new(counted.clone()));
            let mut state = request(tp_rank);
            block_on(Loader::new().load(&mut state, &reader)).unwrap();
            (state, counted.counts().bytes_read)
        })
        .collect();
    for exchange in [Exchange::Broadcast, Exchange::GatherRounds] {
        let counted: Vec<_> =
            (0..2).map(|_| CountingStorage::new(Arc::clone(&storage) as _)).collect();
        on_mesh(2, 2, |mesh| {
            let mine = counted[mesh.tp_rank as usize].clone();
            let inner = Arc::new(DcpReader::new(Arc::new(mine)));
            let reader = ParallelReader::new(inner, mesh.replicas)
                .sharing(ReadSharing::Always)
                .world_rank(mesh.rank)
                .exchange(exchange);
            let mut state = request(mesh.tp_rank);
            block_on(
                Loader::with_settings(Settings::in_group(mesh.world)).load(&mut state, &reader),
            )
            .unwrap();
            let expected = Value::Dict(alone[mesh.tp_rank as usize].0.clone());
            assert!(Value::Dict(state).same(&expected), "rank {}", mesh.rank);
        });
        for (counted, (_, alone)) in counted.iter().zip(&alone) {
            assert!(counted.counts().bytes_read <= *alone);
        }
    }
}
