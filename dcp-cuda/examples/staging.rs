//! The program of `cargo xtask bench cuda`: bytes per second between a CUDA device and host memory,
//! through [`PinnedStaging`] and by plain copies of pinned memory, and the time for which an
//! asynchronous save of device memory stops training. `staging GIB DIR`.
#![allow(clippy::print_stdout, reason = "a program that prints")]
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges, of one here")]

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use dcp_core::device::{DeviceError, DeviceMemory};
use dcp_core::{DType, StateDict, Tensor, Value};
use dcp_cuda::{CudaDevice, CudaMemory, Device as _, PinnedStaging};
use dcp_engine::{BackgroundSaver, Saver};
use dcp_formats::dcp::DcpWriter;
use dcp_storage_fs::FsStorage;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// A tensor of the state, and a plain copy.
const TENSOR_BYTES: usize = 128 << 20;
/// A copy of a save or a load of `dcp-engine`.
const PIECE_BYTES: u64 = 16 << 20;
/// Runs of which the fastest counts, as the one that other work disturbed least.
const ROUNDS: usize = 5;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [gib, folder] = &*args else { return Err("usage: staging GIB DIR".into()) };
    let gib: u64 = gib.parse()?;
    let device = match CudaDevice::open(0) {
        Ok(device) => device,
        Err(error) => {
            let error = dcp_core::error::error_chain(&error);
            println!("SKIPPED: there is no device to measure: {error}");
            return Ok(());
        }
    };
    println!(
        "{}, {gib} GiB in tensors of 128 MiB, the fastest of {ROUNDS}",
        device.context().name()?
    );
    let stream = device.context().default_stream();
    let mut slices = Vec::new();
    for _ in 0..(gib << 30) / TENSOR_BYTES as u64 {
        slices.push(Arc::new(RwLock::new(stream.alloc_zeros::<u8>(TENSOR_BYTES)?)));
    }
    stream.synchronize()?;
    let memory: Vec<_> = slices.iter().map(|slice| CudaMemory::new(Arc::clone(slice))).collect();
    let total = (memory.len() * TENSOR_BYTES) as f64;
    let speed = |time: Duration| total / time.as_secs_f64() / 1e9;

    let (plain_read, plain_write) = plain(&device, &memory)?;
    let staging = PinnedStaging::builder(device).build();
    let tensors: Vec<_> = memory.iter().map(|memory| staging.memory(memory.clone())).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().build()?;
    let read = fastest(|| runtime.block_on(staged_read(&tensors)).map_err(|error| error as _))?;
    let write = fastest(|| runtime.block_on(staged_write(&tensors)).map_err(|error| error as _))?;
    for (what, ours, plain) in
        [("from the device", read, plain_read), ("to the device", write, plain_write)]
    {
        let ratio = plain.as_secs_f64() / ours.as_secs_f64();
        let (ours, plain) = (speed(ours), speed(plain));
        println!("{what}: {ours:.2} GB/s staged, {plain:.2} GB/s plain, ratio {ratio:.2}");
    }

    let stall = stall(&tensors, Path::new(folder))?;
    let per_second = speed(stall);
    println!("stall of an asynchronous save: {:.3} s, {per_second:.2} GB/s", stall.as_secs_f64());
    Ok(())
}

fn fastest(mut run: impl FnMut() -> Result) -> Result<Duration> {
    let mut fastest = Duration::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        run()?;
        fastest = fastest.min(start.elapsed());
    }
    Ok(fastest)
}

/// Copies of whole tensors from and to the same pinned memory.
fn plain(device: &CudaDevice, memory: &[CudaMemory]) -> Result<(Duration, Duration)> {
    let pinned = device.pinned(TENSOR_BYTES).map_err(|error| error as Box<dyn Error>)?;
    let all = [0..TENSOR_BYTES as u64];
    let read = || -> std::result::Result<(), DeviceError> {
        for memory in memory {
            let copy = device.start_read(
                &Arc::new(memory.clone()),
                &all,
                pinned.lend(0..TENSOR_BYTES)?,
            )?;
            device.wait(copy)?;
        }
        Ok(())
    };
    let write = || -> std::result::Result<(), DeviceError> {
        for memory in memory {
            let copy = device.start_write(&Arc::new(memory.clone()), &all, pinned.read()?)?;
            device.wait(copy)?;
        }
        Ok(())
    };
    let read = fastest(|| read().map_err(|error| error as _))?;
    Ok((read, fastest(|| write().map_err(|error| error as _))?))
}

/// The pieces that a save reads, in order, one ahead of the one that is used.
async fn staged_read(tensors: &[Arc<dyn DeviceMemory>]) -> std::result::Result<(), DeviceError> {
    let mut ahead = None;
    for (tensor, at) in pieces(tensors) {
        let tensor = Arc::clone(tensor);
        let next = tokio::spawn(async move { tensor.read(&[at..at + PIECE_BYTES]).await });
        if let Some(piece) = ahead.replace(next) {
            piece.await??;
        }
    }
    match ahead {
        Some(piece) => piece.await?.map(drop),
        None => Ok(()),
    }
}

/// The pieces that a load writes, from the memory that it has read files into.
async fn staged_write(tensors: &[Arc<dyn DeviceMemory>]) -> std::result::Result<(), DeviceError> {
    let mut ahead = None;
    for (tensor, at) in pieces(tensors) {
        let tensor = Arc::clone(tensor);
        let memory = tensor.staging(PIECE_BYTES as usize).ok_or("the pinned memory is in use")?;
        let next =
            tokio::spawn(
                async move { tensor.write(&[at..at + PIECE_BYTES], memory.read()?).await },
            );
        if let Some(piece) = ahead.replace(next) {
            piece.await??;
        }
    }
    match ahead {
        Some(piece) => piece.await?,
        None => Ok(()),
    }
}

fn pieces(
    tensors: &[Arc<dyn DeviceMemory>],
) -> impl Iterator<Item = (&Arc<dyn DeviceMemory>, u64)> {
    let starts = || (0..TENSOR_BYTES as u64).step_by(PIECE_BYTES as usize);
    tensors.iter().flat_map(move |tensor| starts().map(move |at| (tensor, at)))
}

/// The time for which the second of two asynchronous saves stops training: the first one allocates
/// the memory of the copy.
fn stall(tensors: &[Arc<dyn DeviceMemory>], folder: &Path) -> Result<Duration> {
    let mut state = StateDict::new();
    for (number, memory) in tensors.iter().enumerate() {
        let tensor = Tensor::on_device(DType::UInt8, [TENSOR_BYTES as u64], Arc::clone(memory))?;
        state.insert(format!("layers.{number}.weight"), Value::from(tensor));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let saver = BackgroundSaver::new(Saver::new());
    let mut stall = Duration::ZERO;
    for step in ["first", "second"] {
        let storage = FsStorage::builder(folder.join(step)).create(true).open()?;
        let start = Instant::now();
        let saving = saver.start(&state, Arc::new(DcpWriter::new(Arc::new(storage))))?;
        stall = start.elapsed();
        runtime.block_on(saving.wait())?;
    }
    Ok(stall)
}
