//! Each load chooses whether its ranks share their reads.

use std::ops::RangeInclusive;
use std::sync::Arc;

use dcp_core::{DType, Region, StateDict, Storage, Tensor, Value};
use dcp_engine::{Exchange, Loader, ParallelReader, ReadSharing, Saver, Settings};
use dcp_formats::dcp::DcpWriter;

use crate::harness::{block_on, counting_whole, memory, on_ranks, same};
use crate::readers::{CACHES, Cache, Paced, Probe, reader};

const EXCHANGES: [Exchange; 2] = [Exchange::Broadcast, Exchange::GatherRounds];
/// Of a tensor of which two ranks save 288 MiB each if they share it.
const LARGE: [u64; 2] = [384 << 10, 384];
const LARGE_BYTES: u64 = 4 * LARGE[0] * LARGE[1];

/// Bytes that both read to measure, where the second read has a machine to itself, or not.
const MEASURED: RangeInclusive<u64> = 2 * (8 << 20)..=2 * (16 << 20) + 2 * (12 << 20);

fn one(tensor: Tensor) -> StateDict {
    StateDict::from_iter([(Value::from("w"), Value::Tensor(tensor))])
}

fn large() -> Arc<dyn Storage> {
    let storage = memory();
    let state = one(Tensor::zeros(DType::Int32, LARGE).unwrap());
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    storage
}

/// Configured speeds are those of no machine, so the way is known. Messages are so small that each rank
/// has some to read.
#[test]
fn the_expected_times_decide_whether_replicas_share() {
    let shape = [300, 1000];
    let storage = memory();
    let state = one(counting_whole(&shape, 9));
    block_on(Saver::new().save(&state, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    let whole = 4 * 300 * 1000;
    let all_read = |sharing, speeds: fn(u32) -> (u64, u64), exchange| {
        let read = on_ranks(4, |rank, group| {
            let mut state = one(Tensor::zeros(DType::Int32, shape).unwrap());
            let probe = Arc::new(Probe::new(reader(&storage)));
            let (read, received) = speeds(rank);
            let reader = ParallelReader::new(Arc::clone(&probe) as _, Arc::clone(&group))
                .exchange(exchange)
                .sharing(sharing)
                .in_flight(1)
                .speeds(read, received);
            let summary = block_on(
                Loader::with_settings(Settings::in_group(group)).load(&mut state, &reader),
            )
            .unwrap();
            assert!(same(&state, &one(counting_whole(&shape, 9))));
            assert_eq!(summary.read.bytes_needed, whole);
            probe.bytes()
        });
        read.iter().sum::<u64>()
    };
    for exchange in EXCHANGES {
        assert_eq!(all_read(ReadSharing::Auto, |_| (100, 1000), exchange), whole);
        assert_eq!(all_read(ReadSharing::Auto, |_| (1000, 100), exchange), 4 * whole);
        // Ranks that know different speeds take the same way: the slowest decides for all.
        let last_is_slow = |rank| if rank == 3 { (100, 1000) } else { (9000, 1000) };
        assert_eq!(all_read(ReadSharing::Auto, last_is_slow, exchange), whole);
        assert_eq!(all_read(ReadSharing::Never, |_| (1, 1000), exchange), 4 * whole);
        assert_eq!(all_read(ReadSharing::Always, |_| (1000, 1), exchange), whole);
    }
}

/// What all replicas measure decides, whatever that is; no byte is lost either way.
#[test]
fn a_large_load_measures_and_a_small_one_is_shared_by_several_machines() {
    let storage = large();
    let region = |share: u64| Region::new([0, 0], [LARGE[0] / share, LARGE[1]]).unwrap();
    for (share, is_measured, machines) in [(1, true, 1), (8, false, 1), (8, false, 2)] {
        let needed = LARGE_BYTES / share;
        for exchange in EXCHANGES {
            let read = on_ranks(2, |rank, group| {
                let mine = Tensor::zeros_sharded(DType::Int32, LARGE, [region(share)]).unwrap();
                let probe = Arc::new(Probe::new(reader(&storage)));
                let reader = ParallelReader::new(Arc::clone(&probe) as _, Arc::clone(&group))
                    .machine(format!("machine {}", rank % machines))
                    .exchange(exchange);
                block_on(
                    Loader::with_settings(Settings::in_group(group)).load(&mut one(mine), &reader),
                )
                .unwrap();
                probe.bytes()
            });
            let all = read.iter().sum::<u64>();
            let measured = if is_measured { MEASURED } else { 0..=0 };
            let alone = all.checked_sub(2 * needed).is_some_and(|rest| measured.contains(&rest));
            let shared = all.checked_sub(needed).is_some_and(|rest| measured.contains(&rest));
            let expected = match (is_measured, machines) {
                (true, _) => shared || alone,
                (false, 1) => alone,
                (false, _) => shared,
            };
            assert!(expected, "{all} bytes of {needed} per rank on {machines} machines");
        }
    }
}

/// Two ranks of one machine, whose clocks run only while they read. Messages so take no time, and
/// each way of reading takes what the storage takes.
#[test]
fn ranks_of_a_machine_share_unless_it_keeps_what_one_of_them_has_read() {
    let storage = large();
    for (cache, shares) in CACHES {
        let of_machine = Cache::default();
        let read = on_ranks(2, |rank, group| {
            let inner = Paced::new(reader(&storage), cache, rank, &of_machine);
            let probe = Arc::new(Probe::new(Arc::new(inner)));
            let reader = ParallelReader::new(Arc::clone(&probe) as _, Arc::clone(&group))
                .machine("the only one");
            let mut state = one(Tensor::zeros(DType::Int32, LARGE).unwrap());
            let load = async {
                Loader::with_settings(Settings::in_group(group)).load(&mut state, &reader).await
            };
            stopped_clock().block_on(load).unwrap();
            probe.bytes()
        });
        let copies = if shares { 1 } else { 2 };
        let all = read.iter().sum::<u64>();
        let measured = all.checked_sub(copies * LARGE_BYTES);
        assert!(measured.is_some_and(|rest| MEASURED.contains(&rest)), "{cache:?}: {all} bytes");
    }
}

/// A runtime whose clock stands still but for timers.
fn stopped_clock() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}
