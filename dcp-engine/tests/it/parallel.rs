//! Ranks share their reads: any plans, any group, every byte read once, and any of them failing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dcp_collectives::{LocalCollective, LocalGroup};
use dcp_conformance::{CollectiveFault, CountingStorage, FaultCollective};
use dcp_core::checkpoint::DataSink;
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Collective, DType, Region, StateDict, StorageReader,
    Tensor, TensorView, Value,
};
use dcp_engine::{Exchange, Loader, ParallelReader, ReadSharing, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_planner::ShareRule;
use proptest::prelude::*;

use crate::harness::{
    blank, block_on, counting, counting_whole, elements, memory, on_boxed_ranks, on_ranks,
    on_tcp_ranks, rows, same, sample, save_sample,
};
use crate::readers::{Failing, Probe, reader};

const EXCHANGES: [Exchange; 2] = [Exchange::Broadcast, Exchange::GatherRounds];

fn load(
    group: Arc<dyn Collective>,
    state: &mut StateDict,
    inner: Arc<dyn StorageReader>,
    exchange: Exchange,
) -> Result<(), CheckpointError> {
    let reader = ParallelReader::new(inner, Arc::clone(&group))
        .exchange(exchange)
        .sharing(ReadSharing::Always);
    block_on(Loader::with_settings(Settings::in_group(group)).load(state, &reader)).map(|_| ())
}

fn one(name: &str, tensor: Tensor) -> StateDict {
    StateDict::from_iter([(Value::from(name), Value::Tensor(tensor))])
}

fn zeros(shape: &[u64], region: &Region) -> Tensor {
    Tensor::zeros_sharded(DType::Int32, shape, [region.clone()]).unwrap()
}

/// A model on `tp` tensor-parallel ranks, each with `dp` replicas: the group of all ranks and, for
/// each rank, that of its replicas.
fn on_mesh<T: Send>(
    tp: u32,
    dp: u32,
    main: impl Fn(u32, Arc<dyn Collective>, Arc<dyn Collective>) -> T + Sync,
) -> Vec<T> {
    let patient = Duration::from_secs(120);
    let replicas: Vec<Mutex<Vec<Option<LocalCollective>>>> = (0..tp)
        .map(|_| LocalGroup::new(dp).deadline(patient).build())
        .map(|group| Mutex::new(group.into_iter().map(Some).collect()))
        .collect();
    on_ranks(tp * dp, |rank, world| {
        let group = replicas[(rank % tp) as usize].lock().unwrap()[(rank / tp) as usize].take();
        main(rank, world, Arc::new(group.unwrap()))
    })
}

/// The shape of every tensor of [`model`].
const SHAPE: [u64; 2] = [24, 40];

/// Eight tensors cut over `tp` ranks and a few objects, as replica `dp` has them.
fn model(tp_rank: u32, tp: u32, first: Option<i32>) -> StateDict {
    let region = rows(&SHAPE, tp_rank, tp);
    let mut state = StateDict::new();
    for at in 0..8 {
        let tensor = match first {
            Some(first) => counting(&SHAPE, std::slice::from_ref(&region), first + at * 1000),
            None => zeros(&SHAPE, &region),
        };
        state.insert(format!("w{at}"), tensor);
    }
    for at in 0..3 {
        let text = format!("object {at}");
        state.insert(format!("o{at}"), if first.is_some() { &*text } else { "" });
    }
    state
}

#[test]
fn each_byte_is_read_once_in_the_group() {
    for (tp, dp) in [(2, 2), (2, 3), (1, 4)] {
        let storage = memory();
        let saved = on_ranks(tp, |rank, group| {
            let writer = DcpWriter::new(Arc::clone(&storage));
            block_on(
                Saver::with_settings(Settings::in_group(group))
                    .save(&model(rank, tp, Some(5)), &writer),
            )
            .map(|_| ())
        });
        saved.into_iter().for_each(|result| result.unwrap());
        // What one replica of the model reads by itself.
        let alone = CountingStorage::new(Arc::clone(&storage));
        let needed = on_ranks(tp, |rank, group| {
            let inner = DcpReader::new(Arc::new(alone.clone()));
            let mut state = model(rank, tp, None);
            let loaded =
                block_on(Loader::with_settings(Settings::in_group(group)).load(&mut state, &inner))
                    .unwrap();
            loaded.read.bytes_needed
        });
        let alone = alone.counts().bytes_read;
        for exchange in EXCHANGES {
            for rule in [ShareRule::Megatron, ShareRule::Balanced] {
                let counted = CountingStorage::new(Arc::clone(&storage));
                let read = on_mesh(tp, dp, |rank, world, replicas| {
                    let mut state = model(rank % tp, tp, None);
                    let inner = Arc::new(DcpReader::new(Arc::new(counted.clone())));
                    let reader = ParallelReader::new(inner, replicas)
                        .world_rank(rank)
                        .sharing(ReadSharing::Always)
                        .exchange(exchange)
                        .rule(rule);
                    let loader = Loader::with_settings(Settings::in_group(world));
                    let summary = block_on(loader.load(&mut state, &reader)).unwrap();
                    assert!(same(&state, &model(rank % tp, tp, Some(5))), "rank {rank}");
                    assert_eq!(summary.read.bytes_needed, needed[(rank % tp) as usize]);
                    summary.read.bytes_read
                });
                let all = counted.counts().bytes_read;
                assert!(all <= alone, "{tp} x {dp}: {all} bytes instead of {alone}");
                assert!(read.iter().all(|bytes| *bytes > 0), "{read:?}: a rank had nothing to do");
            }
        }
    }
}

/// Optimizer state cut over the replicas: nobody else needs it, so nobody else gets it.
#[test]
fn what_one_rank_needs_goes_straight_into_its_memory() {
    let storage = memory();
    let shape = [64, 8];
    let state = one("w", counting_whole(&shape, 3));
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    let results = on_ranks(4, |rank, group| {
        let mine = rows(&shape, rank, 4);
        let mut state = one("w", zeros(&shape, &mine));
        let probe = Arc::new(Probe::new(reader(&storage)));
        load(group, &mut state, Arc::clone(&probe) as _, Exchange::Broadcast).unwrap();
        assert!(same(&state, &one("w", counting(&shape, &[mine], 3))));
        (probe.bytes(), probe.reads())
    });
    assert_eq!(results, [(16 * 8 * 4, 1); 4]);
}

#[test]
fn large_tensors_go_in_parts_and_every_rank_reads_some_of_them() {
    let shape = [700, 1000];
    let storage = memory();
    let state = one("w", counting_whole(&shape, 9));
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    for exchange in EXCHANGES {
        let results = on_ranks(3, |_, group| {
            let mut state = one("w", Tensor::zeros(DType::Int32, shape).unwrap());
            let probe = Arc::new(Probe::new(reader(&storage)));
            let reader = ParallelReader::new(Arc::clone(&probe) as _, Arc::clone(&group))
                .exchange(exchange)
                .sharing(ReadSharing::Always)
                .in_flight(1);
            block_on(Loader::with_settings(Settings::in_group(group)).load(&mut state, &reader))
                .unwrap();
            assert!(same(&state, &one("w", counting_whole(&shape, 9))));
            (probe.bytes(), probe.most())
        });
        let (bytes, most): (Vec<u64>, Vec<u64>) = results.into_iter().unzip();
        assert_eq!(bytes.iter().sum::<u64>(), 4 * 700 * 1000);
        assert!(most.iter().all(|most| *most <= 64 << 10), "{most:?}");
        assert!(bytes.iter().all(|bytes| *bytes > 700_000), "{bytes:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_boxes_of_any_ranks_arrive(
        boxes in prop::collection::vec(
            prop::collection::vec((0_u64..9, 0_u64..7, 0_u64..10, 0_u64..8), 0..3), 1..5),
        saved_on in 1_u32..4,
        rounds in any::<bool>(),
    ) {
        let (shape, storage) = ([9, 7], memory());
        let saved = on_ranks(saved_on, |rank, group| {
            let state = one("w", counting(&shape, &[rows(&shape, rank, saved_on)], 3));
            let writer = DcpWriter::new(Arc::clone(&storage));
            block_on(Saver::with_settings(Settings::in_group(group)).save(&state, &writer)).map(|_| ())
        });
        prop_assert!(saved.into_iter().all(|result| result.is_ok()));
        let exchange = EXCHANGES[usize::from(rounds)];
        let region = |&(x, y, a, b): &(u64, u64, u64, u64)| {
            Region::new([x, y], [a.min(9 - x), b.min(7 - y)]).unwrap()
        };
        let read = AtomicU64::default();
        let results = on_ranks(u32::try_from(boxes.len()).unwrap(), |rank, group| {
            let mine: Vec<Region> = boxes[rank as usize].iter().map(region).collect();
            let probe = Arc::new(Probe::new(reader(&storage)));
            let shared = ParallelReader::new(Arc::clone(&probe) as _, group)
                .exchange(exchange)
                .sharing(ReadSharing::Always);
            let metadata = block_on(shared.metadata())?;
            // Boxes of one rank may cover each other: each is a shard of its own.
            let wanted = Boxes::new(&mine);
            block_on(shared.read(&metadata, &wanted.plan(&metadata), Arc::new(wanted.clone())))?;
            read.fetch_add(probe.bytes(), Ordering::Relaxed);
            Ok::<_, CheckpointError>(wanted.hold(&shape, &mine, 3))
        });
        for result in results {
            prop_assert!(result.unwrap());
        }
        let mut all: Vec<u64> = boxes
            .iter()
            .flatten()
            .map(region)
            .filter(|region| !region.is_empty())
            .flat_map(|region| region.runs_in(&shape).collect::<Vec<_>>())
            .flat_map(|(at, len)| at..at + len)
            .collect();
        all.sort_unstable();
        all.dedup();
        // A rank alone reads as its reader does, what its plan has twice, twice.
        if boxes.len() > 1 {
            prop_assert_eq!(read.into_inner(), 4 * all.len() as u64, "each element once");
        }
    }
}

/// Memory for boxes of one tensor.
#[derive(Clone, Debug)]
struct Boxes(Vec<(Region, TensorView)>);

impl Boxes {
    fn new(regions: &[Region]) -> Self {
        let memory = |region: &Region| {
            let zeros = Tensor::zeros(DType::Int32, region.sizes().clone()).unwrap();
            (region.clone(), zeros.shards()[0].view().unwrap().clone())
        };
        Self(regions.iter().map(memory).collect())
    }

    fn plan(&self, metadata: &CheckpointMetadata) -> LoadPlan {
        let (_, entry) = metadata.at(0).unwrap();
        let mut plan = LoadPlan::default();
        for (leaf, (wanted, _)) in self.0.iter().enumerate() {
            for (chunk, stored) in entry.as_tensor().unwrap().chunks.iter().enumerate() {
                let Some(region) = stored.region().unwrap().intersect(wanted) else { continue };
                let chunk = u32::try_from(chunk).unwrap();
                let kind = ReadKind::Tensor { chunk, shard: 0, region };
                let leaf = u32::try_from(leaf).unwrap();
                plan.items.push(dcp_core::plan::ReadItem { entry: 0, leaf, kind });
            }
        }
        plan
    }

    fn hold(&self, shape: &[u64], regions: &[Region], first: i32) -> bool {
        self.0.iter().zip(regions).all(|((_, view), region)| {
            let bytes: Vec<u8> =
                view.payload().unwrap().pieces().iter().flat_map(|b| b.to_vec()).collect();
            bytes == elements(shape, region, first)
        })
    }
}

impl DataSink for Boxes {
    fn destination(&self, item: &dcp_core::plan::ReadItem) -> Result<TensorView, CheckpointError> {
        let ReadKind::Tensor { region, .. } = &item.kind else { panic!("no tensor") };
        let (whole, view) = &self.0[item.leaf as usize];
        Ok(view.narrow(&region.relative_to(whole.offsets()).unwrap())?)
    }

    fn commit(&self, _: &dcp_core::plan::ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, _: &dcp_core::plan::ReadItem, _: Value) -> Result<(), CheckpointError> {
        Ok(())
    }
}

#[test]
fn when_a_rank_cannot_read_every_rank_has_the_same_error() {
    let storage = memory();
    save_sample(2, &storage, 1);
    for exchange in EXCHANGES {
        for (failing, metadata) in [(0, true), (0, false), (2, false)] {
            let results = on_ranks(3, |rank, group| {
                let inner = match rank == failing {
                    true => Arc::new(Failing { inner: reader(&storage), metadata }) as _,
                    false => reader(&storage),
                };
                // Each rank loads everything, so each has something to read.
                load(group, &mut blank(0, 1), inner, exchange)
            });
            let errors: Vec<_> = results.into_iter().map(|r| r.unwrap_err().to_string()).collect();
            let expected = format!("failed on rank {failing}: the disk is on fire");
            assert!(errors.iter().all(|error| error.ends_with(&expected)), "{errors:?}");
            assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        }
    }
}

/// Rank 3 is rank 1 of its replicas.
#[test]
fn errors_name_ranks_as_the_whole_job_does() {
    let storage = memory();
    save_sample(1, &storage, 1);
    let results = on_mesh(2, 2, |rank, world, replicas| {
        let inner = match rank == 3 {
            true => Arc::new(Failing { inner: reader(&storage), metadata: false }) as _,
            false => reader(&storage),
        };
        let reader =
            ParallelReader::new(inner, replicas).world_rank(rank).sharing(ReadSharing::Always);
        block_on(Loader::with_settings(Settings::in_group(world)).load(&mut blank(0, 1), &reader))
            .map(|_| ())
    });
    for result in results {
        let CheckpointError::Ranks { failures, .. } = result.unwrap_err() else { panic!() };
        assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [3]);
    }
}

/// Memory that is lent elsewhere cannot be filled; the other ranks get the error, and wait for
/// nothing.
#[test]
fn a_rank_that_cannot_take_its_part_fails_all() {
    let storage = memory();
    save_sample(1, &storage, 1);
    for exchange in EXCHANGES {
        let results = on_ranks(3, |rank, group| {
            let mut state = blank(0, 1);
            let model = state.get("model").unwrap().as_dict().unwrap().clone();
            let bias = model.get("bias").unwrap().as_tensor().unwrap().clone();
            let lent =
                (rank == 2).then(|| bias.shards()[0].view().unwrap().memory().read().unwrap());
            let result = load(group, &mut state, reader(&storage), exchange);
            drop(lent);
            result
        });
        for result in results {
            let error = result.unwrap_err();
            let CheckpointError::Ranks { failures, .. } = &error else { panic!("{error}") };
            assert_eq!(failures.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [2]);
        }
    }
}

/// A rank that dies at any of its operations ends the load of all others.
#[test]
fn nobody_waits_for_a_dead_rank() {
    let storage = memory();
    save_sample(1, &storage, 1);
    for exchange in EXCHANGES {
        for dying in [0, 2] {
            for operation in 1..8 {
                let results = on_boxed_ranks(3, |rank, group| {
                    let group: Arc<dyn Collective> = if rank == dying {
                        Arc::new(FaultCollective::new(group, operation, CollectiveFault::Die))
                    } else {
                        group.into()
                    };
                    load(group, &mut blank(0, 1), reader(&storage), exchange)
                });
                assert!(results.iter().all(Result::is_err), "rank {dying} at {operation}");
                for error in results.iter().filter_map(|result| result.as_ref().err()) {
                    let text = dcp_core::error::error_chain(error);
                    assert!(
                        !text.contains("did not answer"),
                        "a rank waited for its deadline: {text}"
                    );
                }
            }
        }
    }
}

#[test]
fn ranks_may_be_processes_apart() {
    let storage = memory();
    save_sample(2, &storage, 4);
    on_tcp_ranks(3, |_, group| {
        for exchange in EXCHANGES {
            let mut state = blank(0, 1);
            load(Arc::clone(&group), &mut state, reader(&storage), exchange).unwrap();
            assert!(same(&state, &sample(0, 1, 4)));
        }
    });
}
