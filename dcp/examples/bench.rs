//! The Rust half of `cargo xtask bench`: one measurement per run, printed as a line of JSON.
//!
//! - `save DIR GIB`, `load DIR GIB`: a state dict of tensors of 32 MiB, without a group. GIB may be a
//!   fraction; `save-without-sidecar DIR GIB` leaves the sidecar out.
//! - `save-ranks DIR GIB RANKS`: the same tensors, rows of each on every one of the ranks, which are
//!   threads; `write-files DIR GIB FILES` the same bytes by plain system calls on as many threads.
//! - `stall DIR GIB`: the time for which the second of two asynchronous saves stops training;
//!   `stall-immutable` the same with tensors in immutable memory.
//! - `copy - GIB`: copies the same bytes to memory that was touched before, on all cores; the limit.
//!   `copy-tensors` the same from tensors of 32 MiB, each by one call, to one memory.
//! - `write FILE GIB`, `read FILE GIB`: the same bytes by plain system calls, the limit; `write-direct` and
//!   `read-direct` past the page cache, from several threads.
//! - `save-one DIR`: one tensor of 1 GiB. `slice DIR rows|columns`: the part of rank 37 of 64 of it;
//!   `slice-plain FILE rows|columns` as many bytes at the same distances by plain system calls on all
//!   cores, the limit.
//! - `load-replicas DIR RANKS WAY GROUP`: every rank, a thread, loads the same tensors; `load-shards` other
//!   rows of them. WAY is `alone`, `shared` or `auto`, a `Checkpointer` without options; GROUP is `memory`
//!   or `tcp`.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp::collectives::{LocalGroup, TcpConfig};
use dcp::core::checkpoint::ReadReport;
use dcp::core::{Collective, HostMemory, Shard};
use dcp::engine::ReadSharing;
use dcp::formats::dcp::DcpWriter;
use dcp::{Checkpointer, DType, Region, StateDict, Tensor, Value};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const TENSOR: [u64; 2] = [2048, 4096];
const TENSOR_BYTES: usize = 32 << 20;
const LARGE: [u64; 2] = [65536, 4096];
const PIECE: usize = 8 << 20;
/// Bytes of a plain write: longer ones are slower where memory is fragmented.
const WRITTEN: usize = 512 << 10;
/// What the offsets and the memory of direct I/O are multiples of.
const ALIGNMENT: usize = 4096;
const DIRECT_PIECE: usize = 1 << 20;
const DIRECT_THREADS: usize = 8;
/// Tensors that replicas load: 512 MiB for each rank.
const REPLICATED: usize = 16;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (time, read) = match *args {
        ["save", dir, gib] => {
            let state = model(tensors(gib)?)?;
            warm_up(dir)?;
            let start = Instant::now();
            dcp::save(&state, dir).blocking()?;
            (start.elapsed(), None)
        }
        ["save-without-sidecar", dir, gib] => {
            let state = model(tensors(gib)?)?;
            warm_up(dir)?;
            let plain = Checkpointer::new()
                .writer(|storage| DcpWriter::builder(storage).sidecar(false).build());
            let start = Instant::now();
            plain.save(&state, dir).blocking()?;
            (start.elapsed(), None)
        }
        ["load", dir, gib] => {
            let mut state = model(tensors(gib)?)?;
            warm_up(dir)?;
            let start = Instant::now();
            let summary = dcp::load(&mut state, dir).blocking()?;
            (start.elapsed(), Some(summary.read))
        }
        ["save-ranks", dir, gib, ranks] => (save_ranks(dir, tensors(gib)?, ranks.parse()?)?, None),
        ["write-files", dir, gib, files] => {
            (write_files(dir, tensors(gib)?, files.parse()?)?, None)
        }
        ["stall", dir, gib] => (stall(dir, &model(tensors(gib)?)?)?, None),
        ["stall-immutable", dir, gib] => (stall(dir, &immutable(model(tensors(gib)?)?)?)?, None),
        ["copy", _, gib] => (copy(tensors(gib)?), None),
        ["copy-tensors", _, gib] => (copy_tensors(tensors(gib)?)?, None),
        ["write", file, gib] => (write(file, tensors(gib)?)?, None),
        ["read", file, gib] => (read(file, tensors(gib)?)?, None),
        ["write-direct", file, gib] => (write_direct(file, tensors(gib)?)?, None),
        ["read-direct", file, gib] => (read_direct(file, tensors(gib)?)?, None),
        ["save-one", dir] => {
            let mut state = StateDict::new();
            let memory = vec![7; LARGE.iter().product::<u64>() as usize * 4];
            state.insert("large", Tensor::replicated(DType::Float32, LARGE, memory)?);
            let start = Instant::now();
            dcp::save(&state, dir).blocking()?;
            (start.elapsed(), None)
        }
        ["slice", dir, by] => {
            let [rows, columns] = LARGE;
            let region = match by {
                "rows" => Region::new([37 * rows / 64, 0], [rows / 64, columns])?,
                _ => Region::new([0, 37 * columns / 64], [rows, columns / 64])?,
            };
            let mut state = StateDict::new();
            state.insert("large", Tensor::zeros_sharded(DType::Float32, LARGE, [region])?);
            let before = bytes_read()?;
            let start = Instant::now();
            let summary = dcp::load(&mut state, dir).blocking()?;
            let (time, bytes) = (start.elapsed(), bytes_read()? - before);
            let needed = summary.read.bytes_needed;
            (time, Some(ReadReport::new(needed, bytes)))
        }
        ["slice-plain", file, by] => (slice_plain(file, by == "rows")?, None),
        [what @ ("load-replicas" | "load-shards"), dir, ranks, way, group] => {
            let ranks = ranks.parse()?;
            let shards = if what == "load-shards" { ranks } else { 1 };
            let (time, read) = load_ranks(dir, (ranks, shards), way, group == "tcp")?;
            (time, Some(read))
        }
        _ => return Err("see the comment at the top of this example".into()),
    };
    let (needed, read) = read.map_or((0, 0), |read| (read.bytes_needed, read.bytes_read));
    let seconds = time.as_secs_f64();
    println!("{{\"seconds\": {seconds}, \"bytes_needed\": {needed}, \"bytes_read\": {read}}}");
    Ok(())
}

fn tensors(gib: &str) -> Result<usize> {
    let gib: f64 = gib.parse()?;
    Ok((gib * f64::from(1 << 30)) as usize / TENSOR_BYTES)
}

/// Memory is touched here, so that no page fault is measured later.
fn model(tensors: usize) -> Result<StateDict> {
    let mut state = StateDict::new();
    for number in 0..tensors {
        let memory = vec![u8::try_from(number % 251 + 1)?; TENSOR_BYTES];
        let name = format!("layers.{number}.weight");
        state.insert(name, Tensor::replicated(DType::Float32, TENSOR, memory)?);
    }
    Ok(state)
}

/// The same tensors in memory that nothing writes to.
fn immutable(state: StateDict) -> Result<StateDict> {
    let tensors = state.iter().map(|(name, value)| {
        let view = value.as_tensor().and_then(|tensor| tensor.shards()[0].view());
        let memory = HostMemory::from_bytes(view.ok_or("not in host memory")?.memory().read()?);
        let tensor = Tensor::replicated(DType::Float32, TENSOR, memory)?;
        Ok((name.clone(), Value::Tensor(tensor)))
    });
    tensors.collect()
}

/// The time of the slowest rank.
fn save_ranks(dir: &str, tensors: usize, ranks: u32) -> Result<Duration> {
    warm_up(dir)?;
    let times = LocalGroup::new(ranks).run(|group| {
        let state = rows(tensors, group.rank(), ranks)?;
        let group: Arc<dyn Collective> = Arc::new(group);
        let checkpointer = Checkpointer::in_group(Arc::clone(&group));
        group.barrier()?;
        let start = Instant::now();
        checkpointer.save(&state, dir).blocking()?;
        Ok::<_, Box<dyn Error + Send + Sync>>(start.elapsed())
    });
    let times = times.into_iter().collect::<std::result::Result<Vec<_>, _>>();
    Ok(times.map_err(|error| error.to_string())?.into_iter().max().unwrap_or_default())
}

/// Rows of each tensor, as of one rank of a sharded data-parallel job.
fn rows(
    tensors: usize,
    rank: u32,
    ranks: u32,
) -> std::result::Result<StateDict, Box<dyn Error + Send + Sync>> {
    let [rows, columns] = TENSOR;
    let (start, len) = (rows * u64::from(rank) / u64::from(ranks), rows / u64::from(ranks));
    let mut state = StateDict::new();
    for number in 0..tensors {
        let memory = vec![u8::try_from(number % 251 + 1)?; TENSOR_BYTES / ranks as usize];
        let region = Region::new([start, 0], [len, columns])?;
        let shard = Shard::new(DType::Float32, region, HostMemory::from_vec(memory))?;
        let tensor = Tensor::sharded(DType::Float32, TENSOR, vec![shard])?;
        state.insert(format!("layers.{number}.weight"), tensor);
    }
    Ok(state)
}

fn write_files(dir: &str, tensors: usize, files: usize) -> Result<Duration> {
    std::fs::create_dir_all(dir)?;
    let pieces = vec![7_u8; TENSOR_BYTES];
    let start = Instant::now();
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..files)
            .map(|number| {
                let (path, pieces) = (format!("{dir}/{number}"), &pieces);
                scope.spawn(move || {
                    let mut file = File::create(path)?;
                    for _ in 0..tensors * TENSOR_BYTES / files / WRITTEN {
                        file.write_all(&pieces[..WRITTEN])?;
                    }
                    file.sync_all()
                })
            })
            .collect();
        for writer in writers {
            writer.join().map_err(|_| "a writer panicked")??;
        }
        Ok::<_, Box<dyn Error>>(())
    })?;
    Ok(start.elapsed())
}

/// The runs of a slice of [`LARGE`], each by a call, into memory that was touched before.
fn slice_plain(file: &str, by_rows: bool) -> Result<Duration> {
    let [rows, columns] = LARGE.map(|size| size as usize);
    let row = columns * 4;
    let (run, runs, gap) = if by_rows { (PIECE, 2, PIECE) } else { (row / 64, rows, row) };
    let mut memory = vec![7_u8; run * runs];
    let file = File::open(file)?;
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let of_thread = runs.div_ceil(threads);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..)
            .zip(memory.chunks_mut(of_thread * run))
            .map(|(thread, memory)| {
                let file = &file;
                scope.spawn(move || {
                    for (at, run) in memory.chunks_mut(run).enumerate() {
                        let offset = 37 * (row / 64) + (thread * of_thread + at) * gap;
                        file.read_exact_at(run, offset as u64)?;
                    }
                    Ok::<_, std::io::Error>(())
                })
            })
            .collect();
        for reader in readers {
            reader.join().map_err(|_| "a reader panicked")??;
        }
        Ok::<_, Box<dyn Error>>(())
    })?;
    Ok(start.elapsed())
}

/// The time of the slowest rank, and what all ranks needed and read from the storage.
fn load_ranks(
    dir: &str,
    (ranks, shards): (u32, u32),
    way: &str,
    tcp: bool,
) -> Result<(Duration, ReadReport)> {
    type RankResult = std::result::Result<(Duration, ReadReport), Box<dyn Error + Send + Sync>>;
    let load = |group: Arc<dyn Collective>| -> RankResult {
        let checkpointer = Checkpointer::in_group(Arc::clone(&group));
        let checkpointer = match way {
            "alone" => checkpointer.read_sharing(ReadSharing::Never),
            "shared" => checkpointer.read_sharing(ReadSharing::Always),
            _ => checkpointer,
        };
        let mut state = rows(REPLICATED, group.rank() % shards, shards)?;
        group.barrier()?;
        let start = Instant::now();
        let summary = checkpointer.load(&mut state, dir).blocking()?;
        Ok((start.elapsed(), summary.read))
    };
    let results: Vec<RankResult> = if tcp {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let mut listener = Some(listener);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..ranks)
                .map(|rank| {
                    let mut config = TcpConfig::new(rank, ranks, "127.0.0.1", port);
                    if let Some(listener) = listener.take() {
                        config = config.listener(listener);
                    }
                    scope.spawn(move || load(Arc::new(config.connect()?)))
                })
                .collect();
            let panicked = |_| Err("a rank panicked".into());
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
        })
    } else {
        LocalGroup::new(ranks).run(|group| load(Arc::new(group)))
    };
    let (mut time, mut read) = (Duration::ZERO, ReadReport::default());
    for result in results {
        let (of_rank, report) = result.map_err(|error| error.to_string())?;
        time = time.max(of_rank);
        read += report;
    }
    Ok((time, read))
}

/// The second save has the staging memory and the plan of the first.
fn stall(dir: &str, state: &StateDict) -> Result<Duration> {
    let checkpointer = Checkpointer::new();
    dcp::block_on(checkpointer.save(state, dir).background()?.wait())??;
    let start = Instant::now();
    let saving = checkpointer.save(state, dir).background()?;
    let stalled = start.elapsed();
    dcp::block_on(saving.wait())??;
    Ok(stalled)
}

fn copy(tensors: usize) -> Duration {
    let source = vec![7_u8; tensors * TENSOR_BYTES];
    let mut target = vec![8_u8; source.len()];
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let part = source.len().div_ceil(threads);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (target, source) in target.chunks_mut(part).zip(source.chunks(part)) {
            scope.spawn(|| target.copy_from_slice(source));
        }
    });
    let time = start.elapsed();
    // The copy is read, so that it is made.
    assert_eq!(target.last(), Some(&7));
    time
}

fn copy_tensors(tensors: usize) -> Result<Duration> {
    let sources: Vec<_> = (0..tensors).map(|_| vec![7_u8; TENSOR_BYTES]).collect();
    let mut target = vec![8_u8; tensors * TENSOR_BYTES];
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let parts = Mutex::new(sources.iter().zip(target.chunks_mut(TENSOR_BYTES)));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let part = parts.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some((source, target)) = part else { return };
                    target.copy_from_slice(source);
                }
            });
        }
    });
    let time = start.elapsed();
    assert_eq!(target.last(), Some(&7));
    Ok(time)
}

/// A small save and load: code and directory are then in memory, for PyTorch just the same.
fn warm_up(dir: &str) -> Result {
    let url = format!("{dir}.warm-up");
    let mut state = StateDict::new();
    state.insert("small", Tensor::zeros(DType::Float32, [4])?);
    dcp::save(&state, &url).blocking()?;
    dcp::load(&mut state, &url).blocking()?;
    Ok(std::fs::remove_dir_all(url)?)
}

fn write(file: &str, tensors: usize) -> Result<Duration> {
    let pieces: Vec<Vec<u8>> = (0..tensors).map(|_| vec![7; TENSOR_BYTES]).collect();
    let start = Instant::now();
    let mut file = File::create(file)?;
    for piece in pieces.iter().flat_map(|tensor| tensor.chunks(WRITTEN)) {
        file.write_all(piece)?;
    }
    file.sync_all()?;
    Ok(start.elapsed())
}

fn read(file: &str, tensors: usize) -> Result<Duration> {
    let mut pieces: Vec<Vec<u8>> = (0..tensors).map(|_| vec![7; TENSOR_BYTES]).collect();
    let start = Instant::now();
    let mut file = File::open(file)?;
    for piece in pieces.iter_mut().flat_map(|tensor| tensor.chunks_mut(PIECE)) {
        file.read_exact(piece)?;
    }
    Ok(start.elapsed())
}

/// Writes past the page cache, from several threads.
fn write_direct(file: &str, tensors: usize) -> Result<Duration> {
    let mut memory = vec![7; tensors * TENSOR_BYTES + ALIGNMENT];
    let start = Instant::now();
    File::create(file)?.set_len((tensors * TENSOR_BYTES) as u64)?;
    directly(File::options().write(true), file, aligned(&mut memory), |file, piece, at| {
        file.write_all_at(piece, at)
    })?;
    File::open(file)?.sync_all()?;
    Ok(start.elapsed())
}

/// Reads past the page cache, from several threads.
fn read_direct(file: &str, tensors: usize) -> Result<Duration> {
    let mut memory = vec![7; tensors * TENSOR_BYTES + ALIGNMENT];
    let start = Instant::now();
    directly(File::options().read(true), file, aligned(&mut memory), |file, piece, at| {
        file.read_exact_at(piece, at)
    })?;
    Ok(start.elapsed())
}

/// The part of the memory that begins at a multiple of [`ALIGNMENT`].
fn aligned(memory: &mut [u8]) -> &mut [u8] {
    let (from, len) = (memory.as_ptr().align_offset(ALIGNMENT), memory.len() - ALIGNMENT);
    &mut memory[from..from + len]
}

/// Moves memory to or from a file in pieces, on [`DIRECT_THREADS`] threads.
fn directly(
    options: &OpenOptions,
    file: &str,
    memory: &mut [u8],
    transfer: impl Fn(&File, &mut [u8], u64) -> std::io::Result<()> + Sync,
) -> Result {
    let flags = rustix::fs::OFlags::DIRECT.bits();
    let file = options.clone().custom_flags(i32::from_ne_bytes(flags.to_ne_bytes())).open(file)?;
    let pieces = Mutex::new((0_u64..).zip(memory.chunks_mut(DIRECT_PIECE)));
    std::thread::scope(|scope| {
        let work = || {
            loop {
                let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((at, piece)) = piece else { return Ok::<_, std::io::Error>(()) };
                transfer(&file, piece, at * DIRECT_PIECE as u64)?;
            }
        };
        let threads: Vec<_> = (0..DIRECT_THREADS).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })
}

/// Bytes that this process has requested of the kernel so far.
fn bytes_read() -> Result<u64> {
    let counters = std::fs::read_to_string("/proc/self/io")?;
    let line = counters.lines().find_map(|line| line.strip_prefix("rchar: "));
    Ok(line.ok_or("/proc/self/io has no rchar")?.parse()?)
}
