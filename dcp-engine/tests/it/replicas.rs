//! Ranks share with their replicas, and where there are none, sharing costs one message.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dcp_conformance::{CollectiveFault, FaultCollective};
use dcp_core::device::DeviceMemory;
use dcp_core::error::error_chain;
use dcp_core::{
    CheckpointError, Collective, DType, Region, Shard, StateDict, Storage, StorageReader, Tensor,
    Value,
};
use dcp_engine::{Exchange, LoadSummary, Loader, ParallelReader, ReadSharing, Saver, Settings};
use dcp_formats::dcp::DcpWriter;
use dcp_testing::{CountingCollective, FakeDevice, Traffic};
use proptest::prelude::*;

use crate::harness::{
    block_on, counting, counting_whole, elements, memory, on_boxed_ranks, on_ranks, rows, same,
};
use crate::readers::{Failing, Probe, reader};

const SHAPE: [u64; 2] = [24, 40];
/// Bytes of both tensors.
const WHOLE: u64 = 2 * 4 * 24 * 40;
/// With the byte by which data differs from failures.
const OFFER: usize = 41;

/// Two tensors of which a rank needs some rows, and objects.
#[derive(Clone, Debug)]
struct Wanted {
    rows: Option<Region>,
    objects: Vec<&'static str>,
}

const OBJECTS: [&str; 4] = ["step", "rng0", "rng1", "rng2"];

fn wanted(rows: Option<Region>) -> Wanted {
    Wanted { rows, objects: vec!["step"] }
}

fn whole() -> Wanted {
    wanted(Some(Region::full(SHAPE).unwrap()))
}

fn shard(at: u32, of: u32) -> Wanted {
    wanted(Some(rows(&SHAPE, at, of)))
}

impl Wanted {
    /// The values of the checkpoint, or memory for them.
    fn state(&self, filled: bool) -> StateDict {
        let mut state = StateDict::new();
        for (name, first) in [("w0", 5), ("w1", 2000)] {
            let Some(rows) = &self.rows else { continue };
            let tensor = match filled {
                true => counting(&SHAPE, std::slice::from_ref(rows), first),
                false => Tensor::zeros_sharded(DType::Int32, SHAPE, [rows.clone()]).unwrap(),
            };
            state.insert(name, tensor);
        }
        for name in &self.objects {
            state.insert(*name, if filled { *name } else { "" });
        }
        state
    }

    fn byte_len(&self) -> u64 {
        self.rows.as_ref().map_or(0, |rows| 2 * 4 * rows.volume())
    }
}

fn saved() -> Arc<dyn Storage> {
    let storage = memory();
    let everything = Wanted { objects: OBJECTS.to_vec(), ..whole() };
    let writer = DcpWriter::new(Arc::clone(&storage));
    block_on(Saver::new().save(&everything.state(true), &writer)).unwrap();
    storage
}

/// What one rank did.
struct Loaded {
    bytes: u64,
    calls: Vec<(&'static str, usize)>,
}

/// Loads on as many ranks as there are plans, and compares what is loaded.
fn load_all(
    plans: &[Wanted],
    with: impl Fn(u32, ParallelReader) -> ParallelReader + Sync,
) -> Vec<Loaded> {
    let storage = saved();
    on_ranks(u32::try_from(plans.len()).unwrap(), |rank, group| {
        let group = Arc::new(CountingCollective::new(group));
        let probe = Arc::new(Probe::new(reader(&storage)));
        let plain = ParallelReader::new(Arc::clone(&probe) as _, Arc::clone(&group) as _);
        let shared = with(rank, plain.replicas_only(true).index_per_rank(true));
        let plan = &plans[rank as usize];
        let mut state = plan.state(false);
        let loader = Loader::with_settings(Settings::in_group(Arc::clone(&group) as _));
        let summary = block_on(loader.load_shared(&mut state, &shared)).unwrap();
        assert!(same(&state, &plan.state(true)), "rank {rank}: {state:?}");
        let mut alone = plan.state(false);
        let of_one = block_on(Loader::new().load(&mut alone, &reader(&storage))).unwrap();
        assert!(same(&state, &alone));
        assert_eq!(summary.read.bytes_needed, of_one.read.bytes_needed, "rank {rank}");
        Loaded { bytes: probe.bytes(), calls: group.take() }
    })
}

fn bytes(loaded: &[Loaded]) -> u64 {
    loaded.iter().map(|rank| rank.bytes).sum()
}

/// The names of the calls of each rank.
fn calls(loaded: &[Loaded]) -> Vec<Vec<&'static str>> {
    loaded.iter().map(|rank| rank.calls.iter().map(|call| call.0).collect()).collect()
}

fn apart(rank: u32, reader: ParallelReader) -> ParallelReader {
    reader.machine(format!("machine {rank}"))
}

fn together(_: u32, reader: ParallelReader) -> ParallelReader {
    reader.machine("the only one")
}

/// What each sees, what each offers, whether all have read, and whether all took their state.
const ALONE: [&str; 4] = ["all_gather"; 4];

#[test]
fn replicas_on_several_machines_read_each_byte_once() {
    let loaded = load_all(&[0; 4].map(|_| whole()), apart);
    assert_eq!(bytes(&loaded), WHOLE);
    // Two machines with two ranks each.
    let halves = |rank, reader: ParallelReader| apart(rank / 2, reader);
    assert_eq!(bytes(&load_all(&[0; 4].map(|_| whole()), halves)), WHOLE);
}

#[test]
fn replicas_of_one_machine_read_a_small_load_themselves() {
    let loaded = load_all(&[0; 4].map(|_| whole()), together);
    assert_eq!(bytes(&loaded), 4 * WHOLE);
    assert_eq!(calls(&loaded), vec![ALONE.to_vec(); 4]);
    let always = |_, reader: ParallelReader| reader.sharing(ReadSharing::Always);
    assert_eq!(bytes(&load_all(&[0; 4].map(|_| whole()), always)), WHOLE);
    let never = |rank, reader| apart(rank, reader).sharing(ReadSharing::Never);
    let loaded = load_all(&[0; 4].map(|_| whole()), never);
    assert_eq!(bytes(&loaded), 4 * WHOLE);
}

#[test]
fn shards_send_one_message_of_40_bytes_and_no_plan() {
    let shards: Vec<Wanted> = (0..5).map(|rank| shard(rank, 5)).collect();
    for with in [apart, together] {
        let loaded = load_all(&shards, with);
        assert_eq!(bytes(&loaded), WHOLE);
        assert_eq!(calls(&loaded), vec![ALONE.to_vec(); 5]);
        assert!(loaded.iter().all(|rank| rank.calls[1].1 == 5 * OFFER));
    }
    let always = |_, reader: ParallelReader| reader.sharing(ReadSharing::Always);
    assert_eq!(calls(&load_all(&shards, always)), vec![ALONE.to_vec(); 5]);
}

/// Four replicas of each half of a model.
#[test]
fn each_group_of_replicas_reads_its_part_once() {
    let ranks: Vec<Wanted> = (0..8).map(|rank| shard(rank % 2, 2)).collect();
    let loaded = load_all(&ranks, apart);
    assert_eq!(bytes(&loaded), WHOLE);
    // Of each group one rank sends the plan.
    let sent = loaded.iter().filter(|rank| rank.calls[2].1 > 0);
    assert_eq!(sent.count(), 2);
    assert!(loaded.iter().all(|rank| rank.calls[2].0 == "gather"));
}

/// What is sent goes to all ranks, so each would receive 17 times what it needs.
#[test]
fn many_groups_of_replicas_send_no_plans() {
    let ranks = |groups: u32| -> Vec<Wanted> {
        (0..2 * groups).map(|rank| shard(rank % groups, 24)).collect()
    };
    let loaded = load_all(&ranks(17), apart);
    assert_eq!(bytes(&loaded), 2 * 17 * WHOLE / 24);
    assert_eq!(calls(&loaded), vec![ALONE.to_vec(); 34]);
    assert_eq!(bytes(&load_all(&ranks(16), apart)), 16 * WHOLE / 24);
    let always = |_, reader: ParallelReader| reader.sharing(ReadSharing::Always);
    assert_eq!(bytes(&load_all(&ranks(17), always)), 17 * WHOLE / 24);
}

#[test]
fn a_rank_without_replicas_reads_by_itself_and_sends_no_plan() {
    for other in [shard(1, 3), wanted(None), Wanted { rows: None, objects: Vec::new() }] {
        let loaded = load_all(&[whole(), other.clone(), whole()], apart);
        assert_eq!(bytes(&loaded), WHOLE + other.byte_len());
        assert_eq!(loaded[1].bytes, other.byte_len());
        let gathered: Vec<usize> = loaded.iter().map(|rank| rank.calls[2].1).collect();
        assert!(gathered[0] > 0 && gathered[1..] == [0, 0], "{gathered:?}");
    }
    // Those without anything are no replicas of each other.
    let nothing = Wanted { rows: None, objects: Vec::new() };
    let loaded = load_all(&[whole(), nothing.clone(), nothing], apart);
    assert_eq!(calls(&loaded), vec![ALONE.to_vec(); 3]);
}

/// The states of random generators and data loaders are of one rank each.
#[test]
fn replicas_with_objects_of_their_own_share_their_tensors() {
    let own = |name| Wanted { objects: vec![name, "step"], ..whole() };
    let loaded = load_all(&["rng0", "rng1", "rng2"].map(own), apart);
    assert_eq!(bytes(&loaded), WHOLE);
    // An object that some have, and ranks that have nothing else.
    let loaded = load_all(&[own("rng0"), whole(), wanted(None), wanted(None)], apart);
    assert_eq!(bytes(&loaded), WHOLE);
}

/// The slowest rank decides for all, by the speeds of all.
#[test]
fn known_speeds_decide_for_replicas() {
    for (received, copies) in [(1000, 1), (10, 4)] {
        let with = |rank, reader: ParallelReader| {
            reader.speeds(100, if rank == 2 { received } else { 9000 })
        };
        let loaded = load_all(&[0; 4].map(|_| whole()), with);
        assert_eq!(bytes(&loaded), copies * WHOLE);
    }
    let (shape, storage) = ([300, 1000], memory());
    let full = StateDict::from([("w", counting_whole(&shape, 9))]);
    block_on(Saver::new().save(&full, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    let read = on_ranks(4, |_, group| {
        let probe = Arc::new(Probe::new(reader(&storage)));
        let plain = ParallelReader::new(Arc::clone(&probe) as _, Arc::clone(&group));
        let shared = plain.replicas_only(true).index_per_rank(true).in_flight(1).speeds(1, 1 << 40);
        let mut state = StateDict::from([("w", Tensor::zeros(DType::Int32, shape).unwrap())]);
        block_on(Loader::with_settings(Settings::in_group(group)).load_shared(&mut state, &shared))
            .unwrap();
        assert!(same(&state, &full));
        probe.bytes()
    });
    assert_eq!(read.iter().sum::<u64>(), 4 * 300 * 1000);
}

/// Loads one tensor on a device of each rank, in rounds of 1000 bytes, on machines of their own.
fn load_on_devices(
    regions: &[Region],
    with: impl Fn(ParallelReader) -> ParallelReader + Sync,
    failing: Option<u32>,
) -> Vec<(Result<LoadSummary, CheckpointError>, Loaded)> {
    let storage = saved();
    on_ranks(u32::try_from(regions.len()).unwrap(), |rank, group| {
        let group = Arc::new(CountingCollective::new(group));
        let probe = Arc::new(Probe::new(reader(&storage)));
        let inner: Arc<dyn StorageReader> = match failing == Some(rank) {
            true => Arc::new(Failing { inner: reader(&storage), metadata: false }),
            false => Arc::clone(&probe) as _,
        };
        let plain = ParallelReader::new(inner, Arc::clone(&group) as _)
            .replicas_only(true)
            .index_per_rank(true);
        let shared = with(apart(rank, plain));
        let region = &regions[rank as usize];
        let traffic = Arc::new(Traffic::default());
        let device = FakeDevice::new(vec![0; region.volume() as usize * 4], &traffic);
        let memory: Arc<dyn DeviceMemory> = Arc::clone(&device) as _;
        let shard = Shard::on_device(DType::Int32, region.clone(), memory);
        let tensor = Tensor::sharded(DType::Int32, SHAPE, vec![shard.unwrap()]).unwrap();
        let mut state = StateDict::from([("w0", Value::from(tensor)), ("step", Value::from(""))]);
        let loader =
            Loader::with_settings(Settings::in_group(Arc::clone(&group) as _).staging_bytes(2000));
        let result = block_on(loader.load_shared(&mut state, &shared));
        if result.is_ok() {
            assert!(device.bytes() == elements(&SHAPE, region, 5), "rank {rank}");
        }
        (result, Loaded { bytes: probe.bytes(), calls: group.take() })
    })
}

#[test]
fn rounds_of_devices_follow_one_decision() {
    let full = Region::full(SHAPE).unwrap();
    let only = |loaded: Vec<(Result<LoadSummary, CheckpointError>, Loaded)>| -> Vec<Loaded> {
        loaded.into_iter().map(|(result, loaded)| result.map(|_| loaded).unwrap()).collect()
    };
    let same = |reader| reader;
    let shared = only(load_on_devices(&[full.clone(), full.clone(), full.clone()], same, None));
    assert_eq!(bytes(&shared), 4 * 24 * 40);
    // One message for all rounds where there are no replicas, or all read faster than they receive.
    let shards: Vec<Region> = (0..3).map(|rank| rows(&SHAPE, rank, 3)).collect();
    let alone = only(load_on_devices(&shards, same, None));
    assert_eq!(calls(&alone), vec![ALONE.to_vec(); 3]);
    let slow = |reader: ParallelReader| reader.speeds(1000, 1);
    let alone = only(load_on_devices(&[full.clone(), full.clone()], slow, None));
    assert_eq!(bytes(&alone), 2 * 4 * 24 * 40);
    // Plans, the schedule, the assignments and the speeds are for all rounds.
    let expected = [&ALONE[..2], &["gather", "broadcast", "scatter"], &["all_gather"; 3]];
    assert_eq!(calls(&alone), vec![expected.concat(); 2]);
    // A rank whose layout is another one has other rounds.
    let shared = only(load_on_devices(&[full.clone(), shards[1].clone(), full], same, None));
    assert_eq!(bytes(&shared), 4 * 24 * 40 + 4 * 8 * 40);
}

#[test]
fn when_a_rank_cannot_read_all_have_the_same_error_in_any_round() {
    let full = Region::full(SHAPE).unwrap();
    let shards: Vec<Region> = (0..3).map(|rank| rows(&SHAPE, rank, 3)).collect();
    for regions in [vec![full.clone(), full.clone(), full], shards] {
        let loaded = load_on_devices(&regions, |reader| reader.in_flight(1), Some(1));
        let errors: Vec<String> =
            loaded.into_iter().map(|(result, _)| result.unwrap_err().to_string()).collect();
        assert!(errors[0].ends_with("failed on rank 1: the disk is on fire"), "{errors:?}");
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
}

/// Every rank is lost at each of its messages, where ranks share and where they do not.
#[test]
fn nobody_waits_for_a_dead_replica() {
    let storage = saved();
    let plans = [[whole(), whole(), whole()], [0, 1, 2].map(|rank| shard(rank, 3))];
    for (plans, operations) in plans.iter().zip([1..8, 1..5]) {
        for (dying, operation) in operations.flat_map(|operation| [(0, operation), (2, operation)])
        {
            let results = on_boxed_ranks(3, |rank, group| {
                let group: Arc<dyn Collective> = match rank == dying {
                    true => Arc::new(FaultCollective::new(group, operation, CollectiveFault::Die)),
                    false => group.into(),
                };
                let plain = ParallelReader::new(reader(&storage), Arc::clone(&group));
                let shared = apart(rank, plain.replicas_only(true).index_per_rank(true));
                let mut state = plans[rank as usize].state(false);
                block_on(
                    Loader::with_settings(Settings::in_group(group))
                        .load_shared(&mut state, &shared),
                )
                .map(drop)
            });
            for error in results.into_iter().map(Result::unwrap_err) {
                let text = error_chain(&error);
                assert!(!text.contains("did not answer"), "a rank waited: {text}");
            }
        }
    }
}

/// One reader loads again after a load that failed on one rank alone.
#[test]
fn a_reader_decides_for_each_load() {
    let storage = saved();
    on_ranks(2, |rank, group| {
        let probe = Arc::new(Probe::new(reader(&storage)));
        let plain = ParallelReader::new(Arc::clone(&probe) as _, Arc::clone(&group));
        let shared = apart(rank, plain.replicas_only(true).index_per_rank(true));
        let loader = Loader::with_settings(Settings::in_group(group));
        let mut lent = shard(rank, 2).state(false);
        let tensor = lent.get("w1").unwrap().as_tensor().unwrap().clone();
        let loan = (rank == 1).then(|| tensor.shards()[0].view().unwrap().memory().read().unwrap());
        block_on(loader.load_shared(&mut lent, &shared)).unwrap_err();
        drop(loan);
        let read = AtomicU64::new(probe.bytes());
        for plan in [whole(), shard(rank, 2), whole()] {
            let mut state = plan.state(false);
            block_on(loader.load_shared(&mut state, &shared)).unwrap();
            assert!(same(&state, &plan.state(true)));
            let now = probe.bytes();
            let of_load = now - read.swap(now, Ordering::Relaxed);
            assert!(of_load < WHOLE, "rank {rank} read all by itself");
        }
    });
}

fn any_plan() -> impl Strategy<Value = Wanted> {
    let region = prop_oneof![
        Just(Some(Region::full(SHAPE).unwrap())),
        (0_u32..3).prop_map(|at| Some(rows(&SHAPE, at, 3))),
        (0_u64..24, 0_u64..25).prop_map(|(start, len)| {
            Some(Region::new([start, 0], [len.min(24 - start), 40]).unwrap())
        }),
        Just(None),
    ];
    let objects = prop::sample::subsequence(OBJECTS.to_vec(), 0..=OBJECTS.len());
    (region, objects).prop_map(|(rows, objects)| Wanted { rows, objects })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn whatever_ranks_need_and_share_they_load_what_each_would_alone(
        kinds in prop::collection::vec(any_plan(), 1..4),
        ranks in prop::collection::vec((any::<prop::sample::Index>(), 0_u32..3), 1..6),
        sharing in prop::sample::select(
            vec![ReadSharing::Auto, ReadSharing::Always, ReadSharing::Never]),
        (replicas_only, rounds, known) in any::<(bool, bool, bool)>(),
        in_flight in prop::sample::select(vec![1, 32 << 20]),
    ) {
        let plans: Vec<Wanted> =
            ranks.iter().map(|(kind, _)| kind.get(&kinds).clone()).collect();
        let loaded = load_all(&plans, |rank, reader| {
            let exchange = if rounds { Exchange::GatherRounds } else { Exchange::Broadcast };
            let reader = apart(ranks[rank as usize].1, reader)
                .replicas_only(replicas_only)
                .sharing(sharing)
                .exchange(exchange)
                .in_flight(in_flight);
            if known { reader.speeds(1, 2) } else { reader }
        });
        let alone = plans.iter().map(Wanted::byte_len).sum::<u64>();
        prop_assert!(bytes(&loaded) <= alone);
        if sharing == ReadSharing::Never || plans.len() == 1 {
            prop_assert_eq!(bytes(&loaded), alone);
        }
    }
}
