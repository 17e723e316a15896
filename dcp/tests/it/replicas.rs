//! The ranks of a group share what they load where that is faster, without an option.

use std::sync::Arc;
use std::time::Duration;

use dcp::core::error::error_chain;
use dcp::engine::ReadSharing;
use dcp::{
    CheckpointError, Checkpointer, DType, Region, StateDict, Storage, StorageRegistry, Tensor,
    Value,
};
use dcp_conformance::{CountingStorage, MemoryStorage, SlowStorage};
use dcp_core::Key;
use dcp_testing::{CountingCollective, on_ranks};

const URL: &str = "counted://run/step-1";

/// A storage at [`URL`] that counts, and on all clones what is in it.
fn counted(storage: &Arc<dyn Storage>) -> (CountingStorage, StorageRegistry) {
    let counting = CountingStorage::new(Arc::clone(storage));
    let (mut storages, opened) = (StorageRegistry::empty(), counting.clone());
    storages.register("counted", move |_| Ok(Arc::new(opened.clone())));
    (counting, storages)
}

fn state(tensor: Tensor) -> StateDict {
    StateDict::from([("weight", Value::from(tensor)), ("step", Value::from(3))])
}

fn filled(shape: [u64; 2]) -> StateDict {
    let pattern: Vec<u8> = (0..251).collect();
    let len = (shape[0] * shape[1]) as usize;
    let mut bytes = pattern.repeat(len.div_ceil(pattern.len()));
    bytes.truncate(len);
    state(Tensor::replicated(DType::UInt8, shape, bytes).unwrap())
}

fn saved(shape: [u64; 2]) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let (_, storages) = counted(&storage);
    let saver = Checkpointer::new().storages(storages);
    saver.save(&filled(shape), URL).blocking().unwrap();
    storage
}

/// How often the files of a checkpoint were read: the data, and the index.
fn reads(counting: &CountingStorage) -> [u64; 2] {
    ["__0_0.distcp", ".metadata"].map(|name| counting.requests(&Key::new(name).unwrap()))
}

const SMALL: [u64; 2] = [64, 100];

/// The calls of one rank, and their bytes.
type Calls = Vec<(&'static str, usize)>;

/// What four ranks of this machine read, and the calls of each.
fn load_small(
    shards: bool,
    with: impl Fn(Checkpointer) -> Checkpointer + Sync,
) -> ([u64; 2], Vec<Calls>) {
    let storage = saved(SMALL);
    let (counting, storages) = counted(&storage);
    let calls = on_ranks(4, |rank, group| {
        let group = Arc::new(CountingCollective::new(group));
        let checkpointer = with(Checkpointer::in_group(Arc::clone(&group) as _));
        let rows = if shards { 16 } else { 64 };
        let start = if shards { 16 * u64::from(rank) } else { 0 };
        let region = Region::new([start, 0], [rows, 100]).unwrap();
        let mut into = state(Tensor::zeros_sharded(DType::UInt8, SMALL, [region]).unwrap());
        into.insert("step", 0);
        checkpointer.storages(storages.clone()).load(&mut into, URL).blocking().unwrap();
        let found = into.at("weight").unwrap().as_tensor().unwrap().clone();
        let expected = filled(SMALL).at("weight").unwrap().as_tensor().unwrap().to_vec().unwrap();
        let expected = &expected[start as usize * 100..][..rows as usize * 100];
        let bytes = found.shards()[0].view().unwrap().payload().unwrap().to_bytes();
        assert!(bytes == expected, "rank {rank}");
        assert_eq!(into.get("step").and_then(Value::as_int), Some(3));
        group.take()
    });
    (reads(&counting), calls)
}

#[test]
fn ranks_without_replicas_exchange_40_bytes_each_more_than_without_sharing() {
    let (reads, plain) = load_small(true, |with| with.read_sharing(ReadSharing::Never));
    let (same_reads, calls) = load_small(true, |with| with);
    assert_eq!(reads, same_reads);
    for (mut calls, plain) in calls.into_iter().zip(plain) {
        assert_eq!(calls.remove(1), ("all_gather", 4 * 41));
        assert_eq!(calls, plain);
    }
}

/// All ranks are on this machine, and the load is small.
#[test]
fn an_option_chooses_how_replicas_read() {
    let (alone, plain) = load_small(false, |with| with.read_sharing(ReadSharing::Never));
    // What each sees, whether all have read, and whether all took their state.
    let names = |calls: &Calls| calls.iter().map(|call| call.0).collect::<Vec<_>>();
    assert!(plain.iter().all(|calls| names(calls) == ["all_gather"; 3]), "{plain:?}");
    let (chosen, calls) = load_small(false, |with| with);
    if cfg!(target_os = "linux") {
        assert_eq!(chosen, alone);
        assert!(calls.iter().all(|calls| calls.len() == plain[0].len() + 1), "{calls:?}");
    }
    let (shared, _) = load_small(false, |with| with.read_sharing(ReadSharing::Always));
    assert_eq!(alone[0] % 4, 0);
    assert!(shared[0] <= alone[0] / 4 + 1, "{shared:?} {alone:?}");
    assert_eq!(shared[1], alone[1], "every rank looks at the index");
}

/// Each storage takes 1 s for 100 MiB by a clock that runs only meanwhile: messages take no time.
#[test]
fn large_replicas_share_a_slow_storage_by_default() {
    const LARGE: [u64; 2] = [576 << 10, 1 << 10];
    let whole = LARGE[0] * LARGE[1];
    let fast = saved(LARGE);
    let read = |sharing: Option<ReadSharing>| {
        let slow = SlowStorage::new(Arc::clone(&fast), Duration::from_millis(1));
        let slow: Arc<dyn Storage> = Arc::new(slow.bytes_per_second(100 << 20));
        let (counting, storages) = counted(&slow);
        on_ranks(2, |_, group| {
            let checkpointer = Checkpointer::in_group(group).storages(storages.clone());
            let checkpointer = match sharing {
                Some(sharing) => checkpointer.read_sharing(sharing),
                None => checkpointer,
            };
            let mut into = state(Tensor::zeros(DType::UInt8, LARGE).unwrap());
            let load = async { checkpointer.load(&mut into, URL).await };
            stopped_clock().block_on(load).unwrap();
            let tensor = into.at("weight").unwrap().as_tensor().unwrap();
            let bytes = tensor.shards()[0].view().unwrap().payload().unwrap().to_bytes();
            assert!(bytes.chunks(251).all(|chunk| bytes.starts_with(chunk)));
        });
        counting.counts().bytes_read
    };
    assert!(read(None) < whole * 6 / 5);
    assert!(read(Some(ReadSharing::Never)) >= 2 * whole);
}

/// A runtime whose clock stands still but for timers.
fn stopped_clock() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

#[test]
fn what_fails_on_one_rank_all_ranks_return_in_any_sharing() {
    let storage = saved(SMALL);
    for sharing in [ReadSharing::Auto, ReadSharing::Always, ReadSharing::Never] {
        for (failing, opens) in [(0, false), (2, false), (0, true), (2, true)] {
            let results = on_ranks(3, |rank, group| {
                let (_, mut storages) = counted(&storage);
                let empty: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
                match (rank == failing, opens) {
                    (true, true) => storages = counted(&empty).1,
                    (true, false) => storages = StorageRegistry::empty(),
                    _ => {}
                }
                let checkpointer = Checkpointer::in_group(group).storages(storages);
                let mut into = state(Tensor::zeros(DType::UInt8, SMALL).unwrap());
                let load = checkpointer.read_sharing(sharing).load(&mut into, URL).blocking();
                load.map(drop)
            });
            let errors: Vec<CheckpointError> =
                results.into_iter().map(Result::unwrap_err).collect();
            let texts: Vec<String> = errors.iter().map(|error| error_chain(error)).collect();
            assert!(texts[0].contains(&format!("rank {failing}")), "{texts:?}");
            assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        }
    }
}
