//! Groups of ranks as threads, tensors with known elements.

use std::sync::Arc;
use std::time::Duration;

use dcp_collectives::TcpConfig;
use dcp_core::{
    CheckpointError, Collective, DType, HostMemory, Region, Shard, StateDict, Storage, Tensor,
};
use dcp_engine::{LoadSummary, Loader, SaveSummary, Saver, Settings};
use dcp_formats::dcp::{DcpReader, DcpWriter};
pub(crate) use dcp_testing::{block_on, memory, on_boxed_ranks, on_ranks};

/// Runs `main` on `n` threads that form a group over TCP, as processes of their own would.
pub(crate) fn on_tcp_ranks<T: Send>(
    n: u32,
    main: impl Fn(u32, Arc<dyn Collective>) -> T + Sync,
) -> Vec<T> {
    let (listener, port) = dcp_testing::listener();
    let mut listener = Some(listener);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let patient = Duration::from_secs(120);
                let mut config = TcpConfig::new(rank, n, dcp_testing::loopback().to_string(), port)
                    .deadline(patient)
                    .connect_timeout(patient);
                if let Some(listener) = listener.take() {
                    config = config.listener(listener);
                }
                let main = &main;
                scope.spawn(move || main(rank, Arc::new(config.connect().unwrap())))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub(crate) fn save(
    collective: Arc<dyn Collective>,
    state: &StateDict,
    storage: &Arc<dyn Storage>,
) -> Result<SaveSummary, CheckpointError> {
    let writer = DcpWriter::new(Arc::clone(storage));
    block_on(Saver::with_settings(Settings::in_group(collective)).save(state, &writer))
}

pub(crate) fn load(
    collective: Arc<dyn Collective>,
    state: &mut StateDict,
    storage: &Arc<dyn Storage>,
) -> Result<LoadSummary, CheckpointError> {
    let reader = DcpReader::new(Arc::clone(storage));
    block_on(Loader::with_settings(Settings::in_group(collective)).load(state, &reader))
}

/// The bytes of `region` of an `i32` tensor of `shape` whose elements count up from `first`.
pub(crate) fn elements(shape: &[u64], region: &Region, first: i32) -> Vec<u8> {
    region
        .runs_in(shape)
        .flat_map(|(at, len)| at..at + len)
        .flat_map(|at| (first + i32::try_from(at).unwrap()).to_le_bytes())
        .collect()
}

/// The shards `regions` of that tensor.
pub(crate) fn counting(shape: &[u64], regions: &[Region], first: i32) -> Tensor {
    let shards = regions
        .iter()
        .map(|region| {
            let memory = HostMemory::from_vec(elements(shape, region, first));
            Shard::new(DType::Int32, region.clone(), memory).unwrap()
        })
        .collect();
    Tensor::sharded(DType::Int32, shape, shards).unwrap()
}

/// All of that tensor, on every rank.
pub(crate) fn counting_whole(shape: &[u64], first: i32) -> Tensor {
    let region = Region::full(shape).unwrap();
    Tensor::replicated(DType::Int32, shape, elements(shape, &region, first)).unwrap()
}

/// The rows of `shape` that fall to `rank` of `world`, by PyTorch's ceil rule.
pub(crate) fn rows(shape: &[u64], rank: u32, world: u32) -> Region {
    let step = shape[0].div_ceil(world.into());
    let start = (step * u64::from(rank)).min(shape[0]);
    let end = (start + step).min(shape[0]);
    let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.to_vec());
    (offsets[0], sizes[0]) = (start, end - start);
    Region::new(offsets, sizes).unwrap()
}

/// A small state in which every kind of entry occurs.
pub(crate) fn sample(rank: u32, world: u32, first: i32) -> StateDict {
    let mut model = StateDict::new();
    model.insert("weight", counting(&[7, 3], &[rows(&[7, 3], rank, world)], first));
    model.insert("bias", counting_whole(&[5], first));
    let mut state = StateDict::new();
    state.insert("model", model);
    state.insert("step", i64::from(first));
    state.insert("note", "same everywhere");
    state
}

/// The same state, empty, as the destination of a load on `world` ranks.
pub(crate) fn blank(rank: u32, world: u32) -> StateDict {
    let mut model = StateDict::new();
    let region = rows(&[7, 3], rank, world);
    model.insert("weight", Tensor::zeros_sharded(DType::Int32, [7, 3], [region]).unwrap());
    model.insert("bias", Tensor::zeros(DType::Int32, [5]).unwrap());
    let mut state = StateDict::new();
    state.insert("model", model);
    state.insert("step", 0);
    state.insert("note", "");
    state
}

pub(crate) fn same(a: &StateDict, b: &StateDict) -> bool {
    dcp_core::Value::Dict(a.clone()).same(&dcp_core::Value::Dict(b.clone()))
}

/// Saves [`sample`] on `n` ranks and insists that it works.
pub(crate) fn save_sample(n: u32, storage: &Arc<dyn Storage>, first: i32) {
    for result in on_ranks(n, |rank, group| save(group, &sample(rank, n, first), storage)) {
        result.unwrap();
    }
}

/// Loads on one rank and compares with [`sample`].
pub(crate) fn holds_sample(storage: &Arc<dyn Storage>, first: i32) -> bool {
    let mut state = blank(0, 1);
    let reader = DcpReader::new(Arc::clone(storage));
    match block_on(Loader::new().load(&mut state, &reader)) {
        Ok(_) => same(&state, &sample(0, 1, first)),
        Err(error) => panic!("{}", dcp_core::error::error_chain(&error)),
    }
}
