//! Saves and loads of state dicts on the fake device, by the engine, on a disk.

use std::path::Path;
use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::{
    CheckpointError, Collective, DType, Region, Shard, StateDict, Storage, Tensor, Value,
};
use dcp_cuda::{Device, PinnedStaging};
use dcp_engine::{BackgroundSaver, Loader, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_storage_fs::FsStorage;
use dcp_testing::{block_on, on_ranks};
use proptest::prelude::*;

use crate::copies::{noise, small};
use crate::fake::{FakeGpu, FakeMemory};

const SHAPE: [u64; 2] = [64, 900];

fn storage(folder: &Path) -> Arc<dyn Storage> {
    Arc::new(FsStorage::builder(folder).create(true).open().unwrap())
}

/// A rank's part of a tensor whose rows, or columns, the ranks divide, and a bias of all ranks.
fn regions(rank: u32, world: u32, columns: bool) -> Vec<Region> {
    let axis = usize::from(columns);
    let part = |n: u32| SHAPE[axis] * u64::from(n) / u64::from(world);
    let (mut offsets, mut sizes) = ([0, 0], SHAPE);
    (offsets[axis], sizes[axis]) = (part(rank), part(rank + 1) - part(rank));
    vec![Region::new(offsets, sizes).unwrap()]
}

fn bytes_of(region: &Region, whole: &[u8]) -> Vec<u8> {
    let runs = region.runs_in(&SHAPE);
    let ranges = runs.map(|(at, len)| at as usize * 2..(at + len) as usize * 2);
    ranges.map(|range| &whole[range]).collect::<Vec<_>>().concat()
}

/// The state of a rank on the device, and the memory there.
fn state(
    staging: &PinnedStaging<FakeGpu>,
    regions: &[Region],
    whole: &[u8],
) -> (StateDict, Vec<Arc<FakeMemory>>) {
    let memory: Vec<_> =
        regions.iter().map(|region| FakeMemory::new(bytes_of(region, whole))).collect();
    let shards = regions.iter().zip(&memory).map(|(region, memory)| {
        let memory = staging.memory(Arc::clone(memory));
        Shard::on_device(DType::Int16, region.clone(), memory).unwrap()
    });
    let weight = Tensor::sharded(DType::Int16, SHAPE, shards.collect()).unwrap();
    let bias = staging.memory(FakeMemory::new(whole[..32].to_vec()));
    let bias = Tensor::on_device(DType::UInt8, [32], bias).unwrap();
    let dict = StateDict::from([
        ("layer.weight", Value::from(weight)),
        ("layer.bias", Value::from(bias)),
        ("step", Value::from(7)),
    ]);
    (dict, memory)
}

fn save(
    group: Arc<dyn Collective>,
    state: &StateDict,
    storage: &Arc<dyn Storage>,
    staging: u64,
) -> Result<(), CheckpointError> {
    let saver = Saver::with_settings(Settings::in_group(group).staging_bytes(staging));
    block_on(saver.save(state, &DcpWriter::new(Arc::clone(storage)))).map(drop)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_save_is_loaded_in_another_sharding_with_the_same_bytes(
        saved in 1_u32..4,
        wanted in 1_u32..4,
        columns in any::<bool>(),
        staging_bytes in prop::sample::select(vec![1_u64 << 12, 1 << 16, 1 << 26]),
        lent in prop::sample::select(vec![0_usize, 1 << 16, 1 << 20]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let storage = storage(folder.path());
        let whole = noise(2 * (SHAPE[0] * SHAPE[1]) as usize);
        let (device, control) = FakeGpu::new();
        let builder = PinnedStaging::builder(device).lent_bytes(lent).chunk_bytes(1 << 10);
        let staging = builder.chunks(3).build();
        for saved in on_ranks(saved, |rank, group| {
            let (state, _) = state(&staging, &regions(rank, saved, columns), &whole);
            save(group, &state, &storage, staging_bytes)
        }) {
            saved.unwrap();
        }
        for (rank, device) in (0..).zip(on_ranks(wanted, |rank, group| {
            let zeros = vec![0; whole.len()];
            let (mut state, device) = state(&staging, &regions(rank, wanted, !columns), &zeros);
            let loader = Loader::with_settings(Settings::in_group(group).staging_bytes(staging_bytes));
            block_on(loader.load(&mut state, &DcpReader::new(Arc::clone(&storage)))).unwrap();
            device
        })) {
            for (device, region) in device.iter().zip(regions(rank, wanted, !columns)) {
                prop_assert!(device.bytes() == bytes_of(&region, &whole));
            }
        }
        prop_assert!(control.pinned_peak() <= lent + 3 * (1 << 10));
        staging.release();
        prop_assert_eq!(control.pinned_now(), 0);
    }
}

#[test]
fn a_load_reads_files_into_pinned_memory() {
    let folder = tempfile::tempdir().unwrap();
    let storage = storage(folder.path());
    let whole = noise(2 * (SHAPE[0] * SHAPE[1]) as usize);
    let (staging, control) = small();
    let regions = regions(0, 1, false);
    let (from, _) = state(&staging, &regions, &whole);
    block_on(Saver::new().save(&from, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    let saved = control.started.load(std::sync::atomic::Ordering::SeqCst);
    // The weight and the bias, each at once: nothing went through chunks of 1 KiB.
    assert_eq!(saved, 2);
    let (mut into, device) = state(&staging, &regions, &vec![0; whole.len()]);
    block_on(Loader::new().load(&mut into, &DcpReader::new(storage))).unwrap();
    assert!(device[0].bytes() == whole);
    assert_eq!(control.started.load(std::sync::atomic::Ordering::SeqCst) - saved, 2);
    assert_eq!(control.allocations(), 1);
}

#[test]
fn an_asynchronous_save_has_copied_the_device_before_training_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let storage = storage(folder.path());
    let whole = noise(2 * (SHAPE[0] * SHAPE[1]) as usize);
    let (staging, control) = small();
    let regions = regions(0, 1, false);
    let (from, _) = state(&staging, &regions, &whole);
    let saver = BackgroundSaver::new(Saver::new());
    let saving = saver.start(&from, Arc::new(DcpWriter::new(Arc::clone(&storage)))).unwrap();
    control.fail_copies(true);
    block_on(saving.wait()).unwrap();
    control.fail_copies(false);
    let (mut into, device) = state(&staging, &regions, &vec![0; whole.len()]);
    block_on(Loader::new().load(&mut into, &DcpReader::new(storage))).unwrap();
    assert!(device[0].bytes() == whole);
}

#[test]
fn errors_of_saves_and_loads_name_tensor_and_device() {
    let folder = tempfile::tempdir().unwrap();
    let storage = storage(folder.path());
    let whole = noise(2 * (SHAPE[0] * SHAPE[1]) as usize);
    let (staging, control) = small();
    let (mut state, _) = state(&staging, &regions(0, 1, false), &whole);
    let saved = |state: &StateDict| {
        block_on(Saver::new().save(state, &DcpWriter::new(Arc::clone(&storage)))).map(drop)
    };
    control.fail_pinning(true);
    let text = error_chain(&saved(&state).unwrap_err());
    assert!(text.starts_with("cannot copy \"layer."), "{text}");
    assert!(
        text.contains("from fake:3: cannot pin 262144 bytes of host memory for fake:3"),
        "{text}"
    );
    assert!(text.ends_with("out of locked memory"), "{text}");
    control.fail_pinning(false);
    saved(&state).unwrap();
    control.fail_copies(true);
    for text in [
        error_chain(&saved(&state).unwrap_err()),
        error_chain(
            &block_on(Loader::new().load(&mut state, &DcpReader::new(Arc::clone(&storage))))
                .unwrap_err(),
        ),
    ] {
        assert!(text.starts_with("cannot copy \"layer."), "{text}");
        assert!(text.contains(staging.device().name()), "{text}");
        assert!(text.ends_with("the device fell off the bus"), "{text}");
    }
}
