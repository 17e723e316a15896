//! Shards on devices are saved and loaded as those in host memory are, through bounded pieces.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::device::{DeviceError, DeviceMemory};
use dcp_core::error::error_chain;
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Collective, DType, HostMemory, Region, Shard, StateDict,
    Storage, StorageReader, Tensor, Value,
};
use dcp_engine::{
    BackgroundSaver, Casts, Exchange, Loader, ParallelReader, ReadSharing, Saver, Settings,
    StagedState,
};
use dcp_formats::dcp::{DcpReader, DcpWriter};
use dcp_testing::{FakeDevice, Traffic, on_ranks};
use proptest::prelude::*;

use crate::copies::Watching;
use crate::harness::{block_on, memory};
use crate::reshard::{Grid, case};

/// Bytes without a period of any power of two.
fn noise(len: usize, seed: usize) -> Vec<u8> {
    let byte = |at: usize| (at.wrapping_mul(31) ^ (at >> 8).wrapping_mul(7) ^ seed) as u8;
    let mut bytes: Vec<u8> = (0..len.min(65_537)).map(byte).collect();
    bytes = bytes.repeat(len.div_ceil(65_537).max(1));
    bytes.truncate(len);
    bytes
}

/// The bytes of a region of a tensor whose bytes are these.
fn part(shape: &[u64], element: usize, region: &Region, whole: &[u8]) -> Vec<u8> {
    let runs = region.runs_in(shape);
    let ranges = runs.map(|(at, len)| at as usize * element..(at + len) as usize * element);
    ranges.map(|range| &whole[range]).collect::<Vec<_>>().concat()
}

/// Two tensors of which a rank holds regions, on devices or in host memory.
struct State {
    dict: StateDict,
    devices: Vec<Arc<FakeDevice>>,
}

fn state(
    dtype: DType,
    shape: &[u64],
    regions: Vec<Region>,
    whole: &[u8],
    traffic: Option<&Arc<Traffic>>,
) -> State {
    let mut devices = Vec::new();
    let shards = regions.into_iter().map(|region| {
        let bytes = part(shape, dtype.size(), &region, whole);
        let Some(traffic) = traffic else { return Shard::new(dtype, region, bytes).unwrap() };
        let device = FakeDevice::new(bytes, traffic);
        devices.push(Arc::clone(&device));
        Shard::on_device(dtype, region, device).unwrap()
    });
    let tensor = Tensor::sharded(dtype, shape, shards.collect()).unwrap();
    let dict = StateDict::from([("tensor", Value::from(tensor)), ("step", Value::from(7))]);
    State { dict, devices }
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

/// The data files and the index of a checkpoint.
fn files(storage: &Arc<dyn Storage>) -> Vec<(String, Vec<u8>)> {
    let names = dcp_testing::names(&**storage);
    let read = |name: String| (name.clone(), dcp_testing::get(&**storage, &name).to_vec());
    names.into_iter().map(read).collect()
}

fn save_on_all(
    grid: &Grid,
    dtype: DType,
    shape: &[u64],
    whole: &[u8],
    staging: u64,
    traffic: Option<&Arc<Traffic>>,
) -> Arc<dyn Storage> {
    let storage = memory();
    for saved in on_ranks(grid.world, |rank, group| {
        let state = state(dtype, shape, grid.of(rank), whole, traffic);
        save(group, &state.dict, &storage, staging)
    }) {
        saved.unwrap();
    }
    storage
}

fn any_dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(vec![DType::UInt8, DType::BFloat16, DType::Float32, DType::Complex128])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_save_from_devices_writes_the_same_files_as_one_from_host_memory(
        (shape, grid, _) in case(),
        dtype in any_dtype(),
        staging in 1_u64..200,
    ) {
        let len = shape.iter().product::<u64>() as usize * dtype.size();
        let (whole, traffic) = (noise(len, 3), Arc::new(Traffic::default()));
        let from_host = save_on_all(&grid, dtype, &shape, &whole, staging, None);
        let from_device = save_on_all(&grid, dtype, &shape, &whole, staging, Some(&traffic));
        prop_assert_eq!(files(&from_host), files(&from_device));
        prop_assert!(traffic.largest() <= (staging / 4).max(1));
        prop_assert_eq!(traffic.in_flight(), 0);
    }

    #[test]
    fn devices_load_every_layout(
        (shape, saved, wanted) in case(),
        dtype in any_dtype(),
        staging in 1_u64..200,
        sharing in any::<bool>(),
    ) {
        let len = shape.iter().product::<u64>() as usize * dtype.size();
        let whole = noise(len, 5);
        let storage = save_on_all(&saved, dtype, &shape, &whole, staging, None);
        let traffic = Arc::new(Traffic::default());
        let loaded = on_ranks(wanted.world, |rank, group| {
            let mut into = state(dtype, &shape, wanted.of(rank), &vec![0; len], Some(&traffic));
            let mut reader: Arc<dyn StorageReader> = Arc::new(DcpReader::new(Arc::clone(&storage)));
            if sharing {
                let shared = ParallelReader::new(reader, Arc::clone(&group)).sharing(ReadSharing::Always);
                reader = Arc::new(shared.exchange(Exchange::GatherRounds));
            }
            let loader = Loader::with_settings(Settings::in_group(group).staging_bytes(staging));
            block_on(loader.load(&mut into.dict, &reader)).unwrap();
            into
        });
        for (rank, into) in (0..).zip(loaded) {
            prop_assert_eq!(into.devices.len(), wanted.of(rank).len());
            for (device, region) in into.devices.iter().zip(wanted.of(rank)) {
                prop_assert_eq!(device.bytes(), part(&shape, dtype.size(), &region, &whole));
            }
        }
        prop_assert!(traffic.largest() <= (staging / 4).max(dtype.size() as u64));
    }

    #[test]
    fn casts_from_devices_are_those_from_host_memory(
        (shape, grid, _) in case(),
        to in prop::sample::select(vec![DType::BFloat16, DType::Float64, DType::Float8E4M3Fn]),
        staging in 1_u64..200,
    ) {
        let len = shape.iter().product::<u64>() as usize;
        let whole: Vec<u8> = (0..len).flat_map(|n| (n as f32 / 7.0).to_le_bytes()).collect();
        let cast = |traffic: Option<&Arc<Traffic>>| {
            let storage = memory();
            for saved in on_ranks(grid.world, |rank, group| {
                let state = state(DType::Float32, &shape, grid.of(rank), &whole, traffic);
                let saver = Saver::with_settings(Settings::in_group(group).cast(Casts::to(to)).staging_bytes(staging));
                block_on(saver.save(&state.dict, &DcpWriter::new(Arc::clone(&storage))))
            }) {
                saved.unwrap();
            }
            files(&storage)
        };
        let traffic = Arc::new(Traffic::default());
        prop_assert_eq!(cast(None), cast(Some(&traffic)));
        prop_assert!(traffic.largest() <= (staging / 4).max(8));
    }
}

const MIB: u64 = 1 << 20;

/// Counts what a load holds for devices: from the read of a piece until it is on the device.
#[derive(Debug)]
struct Watched {
    inner: DcpReader,
    traffic: Arc<Traffic>,
    element: u64,
    /// What the rounds that are not yet copied hold.
    rounds: Mutex<Vec<u64>>,
}

#[async_trait]
impl StorageReader for Watched {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.inner.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let volume = |kind: &ReadKind| match kind {
            ReadKind::Tensor { region, .. } => region.volume(),
            _ => 0,
        };
        let bytes = plan.items.iter().map(|item| volume(&item.kind)).sum::<u64>() * self.element;
        // While this round is read, the one before is copied; the one before that is done.
        let done = {
            let mut rounds = self.rounds.lock().unwrap();
            rounds.push(bytes);
            if rounds.len() > 2 { rounds.remove(0) } else { 0 }
        };
        self.traffic.leave(done);
        self.traffic.enter(bytes);
        self.inner.read(metadata, plan, sink).await
    }
}

#[test]
fn a_save_and_a_load_take_64_mib_of_host_memory_whatever_the_size() {
    let shape = [40 * MIB];
    let whole = noise(80 * MIB as usize, 1);
    let regions = || vec![Region::full(shape).unwrap()];
    let traffic = Arc::new(Traffic::default());
    let from = state(DType::Int16, &shape, regions(), &whole, Some(&traffic));
    let storage = memory();
    let writer = DcpWriter::new(Arc::new(Watching::new(Arc::clone(&storage), 1000)));
    block_on(Saver::new().save(&from.dict, &writer)).unwrap();
    assert!(traffic.largest() <= 16 * MIB, "{}", traffic.largest());
    assert!(traffic.most_in_flight() <= 64 * MIB, "{}", traffic.most_in_flight());
    drop(from);

    let traffic = Arc::new(Traffic::default());
    let nothing = vec![0; whole.len()];
    let mut into = state(DType::Int16, &shape, regions(), &nothing, Some(&traffic));
    let (element, rounds) = (2, Default::default());
    let inner = DcpReader::new(storage);
    let reader = Watched { inner, traffic: Arc::clone(&traffic), element, rounds };
    block_on(Loader::new().load(&mut into.dict, &reader)).unwrap();
    assert!(into.devices[0].bytes() == whole);
    assert!(traffic.largest() <= 16 * MIB, "{}", traffic.largest());
    assert!(traffic.most_in_flight() <= 64 * MIB, "{}", traffic.most_in_flight());
}

#[test]
fn damage_of_a_chunk_that_is_read_in_rounds_is_found() {
    const LEN: usize = 200_000;
    let (traffic, whole) = (Arc::new(Traffic::default()), noise(LEN, 2));
    let (shape, storage) = ([LEN as u64], memory());
    let region = || vec![Region::full(shape).unwrap()];
    let from = state(DType::UInt8, &shape, region(), &whole, None);
    block_on(Saver::new().save(&from.dict, &DcpWriter::new(Arc::clone(&storage)))).unwrap();
    let load = |storage: &Arc<dyn Storage>, checked: bool| {
        let mut into = state(DType::UInt8, &shape, region(), &vec![0; LEN], Some(&traffic));
        let reader = DcpReader::builder(Arc::clone(storage)).verify_parts(checked).build();
        let loader = Loader::with_settings(Settings::new().staging_bytes(100_000));
        // The second load finds what the first one found.
        let first = block_on(loader.load(&mut into.dict, &reader)).map(drop);
        let second = block_on(loader.load(&mut into.dict, &reader)).map(drop);
        assert_eq!(first.is_ok(), second.is_ok());
        first
    };
    load(&storage, true).unwrap();
    let mut bytes = dcp_testing::get(&*storage, "__0_0.distcp").to_vec();
    let at = bytes.windows(64).position(|window| window == &whole[150_000..150_064]).unwrap();
    bytes[at] ^= 1;
    dcp_testing::put(&*storage, "__0_0.distcp", bytes);
    load(&storage, false).unwrap();
    let text = error_chain(&load(&storage, true).unwrap_err());
    assert!(text.contains("\"tensor\"") && text.contains("CRC"), "{text}");
}

#[test]
fn a_background_save_copies_devices_before_it_starts() {
    let (traffic, region) = (Arc::new(Traffic::default()), Region::full([3, 5]).unwrap());
    let whole = noise(15, 9);
    let from = state(DType::Int8, &[3, 5], vec![region], &whole, Some(&traffic));
    let saver = BackgroundSaver::new(Saver::new());
    let storage = memory();
    let pending = saver.start(&from.dict, Arc::new(DcpWriter::new(Arc::clone(&storage)))).unwrap();
    // The copy is made: later failures of the device are of no interest.
    traffic.fail();
    block_on(pending.wait()).unwrap();
    let mut into = StateDict::from([("tensor", Tensor::zeros(DType::Int8, [3, 5]).unwrap())]);
    into.insert("step", 0);
    block_on(Loader::new().load(&mut into, &DcpReader::new(storage))).unwrap();
    assert_eq!(into.at("tensor").unwrap().as_tensor().unwrap().to_vec().unwrap(), whole);

    let error = StagedState::of(&from.dict).unwrap_err();
    let text = error_chain(&error);
    assert!(text.contains("\"tensor\"") && text.contains("fake:0"), "{text}");
}

/// A device that notes when a copy starts, and when the bytes of one are dropped.
#[derive(Debug)]
struct Noting(Arc<Mutex<Vec<String>>>);

struct Copied(Vec<u8>, String, Arc<Mutex<Vec<String>>>);

impl AsRef<[u8]> for Copied {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        self.2.lock().unwrap().push(format!("stored {}", self.1));
    }
}

#[async_trait]
impl DeviceMemory for Noting {
    fn device(&self) -> &str {
        "noting:0"
    }

    fn byte_len(&self) -> u64 {
        48 * MIB
    }

    async fn read(&self, ranges: &[Range<u64>]) -> Result<Bytes, DeviceError> {
        let (start, len) = (ranges[0].start / MIB, (ranges[0].end - ranges[0].start) as usize);
        self.0.lock().unwrap().push(format!("started {start}"));
        tokio::task::yield_now().await;
        let notes = Arc::clone(&self.0);
        Ok(Bytes::from_owner(Copied(vec![start as u8; len], start.to_string(), notes)))
    }

    async fn write(&self, _: &[Range<u64>], _: Bytes) -> Result<(), DeviceError> {
        Err("not written here".into())
    }

    fn staging(&self, _: usize) -> Option<HostMemory> {
        None
    }
}

#[test]
fn a_staged_state_is_copied_from_the_device_while_the_piece_before_is_stored() {
    let notes = Arc::default();
    let memory = Arc::new(Noting(Arc::clone(&notes)));
    let tensor = Tensor::on_device(DType::UInt8, [48 * MIB], memory).unwrap();
    let staged = StagedState::of(&StateDict::from([("tensor", tensor)])).unwrap();
    let copy = staged.state().at("tensor").unwrap().as_tensor().unwrap().to_vec().unwrap();
    assert!((0..48).step_by(16).all(|start| copy[start << 20] == start as u8));
    let expected = ["started 0", "started 16", "stored 0", "started 32", "stored 16", "stored 32"];
    assert_eq!(*notes.lock().unwrap(), expected);
}

#[test]
fn errors_name_tensor_and_device() {
    let (traffic, region) = (Arc::new(Traffic::default()), Region::full([8]).unwrap());
    let mut from =
        state(DType::Int8, &[8], vec![region.clone()], &noise(8, 0), Some(&traffic)).dict;
    let storage = memory();
    let writer = DcpWriter::new(Arc::clone(&storage));
    block_on(Saver::new().save(&from, &writer)).unwrap();
    traffic.fail();
    let saved = block_on(Saver::new().save(&from, &writer)).unwrap_err();
    let text = error_chain(&saved);
    assert_eq!(text, "cannot copy \"tensor\" from fake:0: the device fell off the bus");
    let reader = DcpReader::new(Arc::clone(&storage));
    let loaded = block_on(Loader::new().load(&mut from, &reader)).unwrap_err();
    let text = error_chain(&loaded);
    assert_eq!(text, "cannot copy \"tensor\" to fake:0: the device fell off the bus");

    // On two ranks, of which one has a device that fails, both get the error of that one.
    let results = on_ranks(2, |rank, group| {
        let traffic = Arc::new(Traffic::default());
        let mut into = state(DType::Int8, &[8], vec![region.clone()], &[0; 8], Some(&traffic));
        if rank == 1 {
            traffic.fail();
        }
        let inner: Arc<dyn StorageReader> = Arc::new(DcpReader::new(Arc::clone(&storage)));
        let reader = ParallelReader::new(inner, Arc::clone(&group)).sharing(ReadSharing::Always);
        let loader = Loader::with_settings(Settings::in_group(group).staging_bytes(4));
        block_on(loader.load(&mut into.dict, &reader)).unwrap_err()
    });
    for error in results {
        let text = error_chain(&error);
        assert!(text.contains("rank 1") && text.contains("to fake:0"), "{text}");
    }
}

#[test]
fn what_needs_host_memory_refuses_devices() {
    let traffic = Arc::new(Traffic::default());
    let device = FakeDevice::new(vec![0; 8], &traffic);
    let tensor = Tensor::on_device(DType::Int16, [4], device).unwrap();
    assert!(tensor.to_vec().is_none() && tensor.elements::<i16>().is_err());
    let error = tensor.shards()[0].host_view("layer.weight").unwrap_err();
    assert_eq!(
        error.to_string(),
        "\"layer.weight\" is in the memory of fake:0 and needed in host memory; copy it there first"
    );
    // A tuple is one object, which is encoded from host memory.
    let tuple = Value::Tuple(vec![tensor.into()]);
    let writer = DcpWriter::new(memory());
    let state = StateDict::from([("pair", tuple)]);
    let error = block_on(Saver::new().save(&state, &writer)).unwrap_err();
    assert!(error_chain(&error).contains("\"pair\""), "{}", error_chain(&error));
    let device = FakeDevice::new(vec![0; 7], &traffic);
    let error = Tensor::on_device(DType::Int16, [4], device).unwrap_err();
    assert!(error.to_string().contains("fake:0"), "{error}");
}
