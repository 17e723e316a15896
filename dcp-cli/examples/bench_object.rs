//! The Rust half of `cargo xtask bench object`: one measurement per run, printed as a line of JSON.
//!
//! - `count FIXTURES`: requests and bytes of loads and commands, at a server in this process.
//! - `save URL GIB [NAME=VALUE]...`, `load URL GIB [NAME=VALUE]...`: a state dict of tensors of 32
//!   MiB, without a group, with options of the storage.
//! - `raw-save BUCKET GIB [NAME=VALUE]...`, `raw-load BUCKET GIB [NAME=VALUE]...`: the same bytes in
//!   one object, by `object_store` alone.
//! - `serve BUCKET MILLISECONDS`: a server of S3's protocol that delays every answer, until standard
//!   input ends. Prints its address.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp::core::registry::StorageOptions;
use dcp::formats::dcp::DcpReader;
use dcp::{Checkpointer, DType, Opener, Region, StateDict, StorageRegistry, Tensor};
use dcp_conformance::http::{GcsDouble, HttpTraffic, S3Double};
use futures_util::{StreamExt, TryStreamExt, stream};
use nix::sys::resource::{UsageWho, getrusage};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::{ClientOptions, MultipartUpload, ObjectStore, ObjectStoreExt};
use serde_json::{Value, json};

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const TENSOR: [u64; 2] = [2048, 4096];
const TENSOR_BYTES: usize = 32 << 20;
/// What `object_store` alone sends at a time, and how many of them: as many bytes as ours have in
/// flight.
const RAW_BYTES: usize = 16 << 20;
const RAW_IN_FLIGHT: usize = 16;

fn main() -> Result {
    // Only the first call in a process fails to be the first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let report = match *args {
        ["count", fixtures] => dcp::block_on(count(fixtures))??,
        ["save", url, gib, ref options @ ..] => {
            let (state, checkpointer) = (model(tensors(gib)?)?, checkpointer(options)?);
            warm_up(&checkpointer, url)?;
            timed(async || checkpointer.save(&state, url).await.map(drop).map_err(Into::into))?
        }
        ["load", url, gib, ref options @ ..] => {
            let (mut state, checkpointer) = (model(tensors(gib)?)?, checkpointer(options)?);
            warm_up(&checkpointer, url)?;
            timed(async || checkpointer.load(&mut state, url).await.map(drop).map_err(Into::into))?
        }
        ["raw-save", bucket, gib, ref options @ ..] => {
            let store = store(bucket, options)?;
            let memory = Bytes::from(vec![7; tensors(gib)? * TENSOR_BYTES]);
            dcp::block_on(store.put(&"warm-up".into(), "x".into()))??;
            timed(async || raw_save(&*store, &memory).await)?
        }
        ["raw-load", bucket, gib, ref options @ ..] => {
            let store = store(bucket, options)?;
            // Touched before, as the tensors of a state dict are.
            let mut memory = vec![7; tensors(gib)? * TENSOR_BYTES];
            dcp::block_on(store.get(&"warm-up".into()))??;
            timed(async || raw_load(&store, &mut memory).await)?
        }
        ["serve", bucket, milliseconds] => return serve(bucket, milliseconds),
        _ => return Err("see the comment at the top of this example".into()),
    };
    println!("{report}");
    Ok(())
}

/// The time, the processor's time and the additional memory of a job.
fn timed(work: impl AsyncFnOnce() -> Result) -> Result<Value> {
    let (memory, cpu, start) = (peak_memory()?, cpu_seconds()?, Instant::now());
    dcp::block_on(work())??;
    let seconds = start.elapsed().as_secs_f64();
    Ok(json!({
        "seconds": seconds,
        "cpu_seconds": cpu_seconds()? - cpu,
        "memory": peak_memory()?.saturating_sub(memory),
    }))
}

fn cpu_seconds() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let seconds = [usage.user_time(), usage.system_time()];
    Ok(seconds.iter().map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6).sum())
}

/// The most memory that this process had so far, in bytes.
fn peak_memory() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.ok_or("no VmHWM")?.trim().trim_end_matches("kB").trim();
    Ok(kib.parse::<u64>()? << 10)
}

fn tensors(gib: &str) -> Result<usize> {
    Ok((gib.parse::<f64>()? * (1_u64 << 30) as f64) as usize / TENSOR_BYTES)
}

fn model(tensors: usize) -> Result<StateDict> {
    let mut state = StateDict::new();
    for number in 0..tensors {
        let memory = vec![u8::try_from(number % 251 + 1)?; TENSOR_BYTES];
        let name = format!("layers.{number}.weight");
        state.insert(name, Tensor::replicated(DType::Float32, TENSOR, memory)?);
    }
    Ok(state)
}

fn options(options: &[&str]) -> Result<StorageOptions> {
    let pairs = options.iter().map(|option| option.split_once('=').ok_or("NAME=VALUE"));
    Ok(pairs.collect::<std::result::Result<Vec<_>, _>>()?.into_iter().collect())
}

fn storages(given: &[&str]) -> Result<StorageRegistry> {
    Ok(dcp::default_storages().options(options(given)?))
}

fn checkpointer(options: &[&str]) -> Result<Checkpointer> {
    Ok(Checkpointer::new().storages(storages(options)?))
}

/// A small save and load: the connection is then open.
fn warm_up(checkpointer: &Checkpointer, url: &str) -> Result {
    let url = format!("{url}-warm-up");
    let mut state = StateDict::new();
    state.insert("small", Tensor::zeros(DType::Float32, [4])?);
    checkpointer.save(&state, &url).blocking()?;
    checkpointer.load(&mut state, &url).blocking()?;
    Ok(())
}

fn store(bucket: &str, given: &[&str]) -> Result<Arc<dyn ObjectStore>> {
    let client = ClientOptions::new()
        .with_allow_http(true)
        .with_timeout_disabled()
        .with_pool_max_idle_per_host(64);
    let mut builder = AmazonS3Builder::from_env().with_bucket_name(bucket);
    for option in given {
        let (name, value) = option.split_once('=').ok_or("NAME=VALUE")?;
        builder = builder.with_config(name.parse::<AmazonS3ConfigKey>()?, value);
    }
    Ok(Arc::new(builder.with_client_options(client).build()?))
}

async fn raw_save(store: &dyn ObjectStore, memory: &Bytes) -> Result {
    let mut upload = store.put_multipart(&"raw".into()).await?;
    let mut parts = Vec::new();
    for start in (0..memory.len()).step_by(RAW_BYTES) {
        let part = memory.slice(start..(start + RAW_BYTES).min(memory.len()));
        parts.push(upload.put_part(part.into()));
    }
    stream::iter(parts).buffer_unordered(RAW_IN_FLIGHT).try_collect::<()>().await?;
    upload.complete().await?;
    Ok(())
}

async fn raw_load(store: &Arc<dyn ObjectStore>, memory: &mut [u8]) -> Result {
    let pieces = memory.chunks_mut(RAW_BYTES).enumerate().map(|(number, piece)| {
        let (store, first) = (Arc::clone(store), (number * RAW_BYTES) as u64);
        async move {
            let range = first..first + piece.len() as u64;
            let found = store.get_range(&"raw".into(), range).await?;
            piece.copy_from_slice(&found);
            Ok::<_, object_store::Error>(())
        }
    });
    stream::iter(pieces).buffer_unordered(RAW_IN_FLIGHT).try_collect::<()>().await?;
    Ok(())
}

/// A server in a process of its own, whose memory is not ours.
fn serve(bucket: &str, milliseconds: &str) -> Result {
    let double = S3Double::start(&[bucket], Duration::from_millis(milliseconds.parse()?))?;
    println!("{}", double.endpoint());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Requests and bytes of what people do most.
async fn count(fixtures: &str) -> Result<Value> {
    let double = GcsDouble::start(&["bench"])?;
    let options =
        StorageOptions::new().with("google_service_account_key", double.service_account());
    let storages = dcp::default_storages().options(options);
    let opener = Opener::new(storages.clone());
    let checkpointer = Checkpointer::new().storages(storages.clone());
    let fixture = |name: &str| format!("{fixtures}/{name}");

    let olmo = "gs://bench/olmo";
    opener.copy(fixture("olmo/fsdp2-2rank-nested/ckpt"), olmo).run().await?;
    let metadata = opener.open(olmo).await?.source().metadata().await?;
    let mut state = StateDict::new();
    for (fqn, entry) in metadata.iter() {
        if let dcp::core::metadata::Entry::Tensor(tensor) = entry
            && fqn.starts_with("model.")
        {
            state.insert(&**fqn, Tensor::zeros(tensor.dtype, tensor.shape.clone())?);
        }
    }
    double.clear();
    let report = checkpointer.load(&mut state, olmo).await?;
    let olmo_load = traffic(double.traffic(), report.read.bytes_needed);

    double.clear();
    let unchecked = checkpointer
        .clone()
        .reader(|storage| DcpReader::builder(storage).check_files(false).build());
    let report = unchecked.load(&mut state, olmo).await?;
    let olmo_unchecked = traffic(double.traffic(), report.read.bytes_needed);

    double.clear();
    opener.open(olmo).await?.inspect().run().await?;
    let inspect = traffic(double.traffic(), 0);

    for step in 0..100 {
        let target = format!("gs://bench/run/step{step}");
        opener.copy(fixture("pytorch/t21_plain"), target).run().await?;
    }
    double.clear();
    opener.list("gs://bench/run").await?;
    let list = traffic(double.traffic(), 0);

    Ok(json!({
        "olmo_load": olmo_load,
        "olmo_unchecked": olmo_unchecked,
        "answers": answers().await?,
        "olmo_inspect": inspect,
        "list": list,
        "reshard": reshard(&double, &storages).await?,
    }))
}

/// The answers that a save of a few parts waits for, one after the other.
async fn answers() -> Result<Value> {
    // Long enough that everything else is a fraction of it.
    const DELAY: Duration = Duration::from_secs(1);
    let double = S3Double::start(&["bench"], DELAY)?;
    let endpoint = format!("aws_endpoint={}", double.endpoint());
    let keys = ["aws_access_key_id=test", "aws_secret_access_key=test", "aws_region=us-east-1"];
    let options = [&endpoint, "aws_allow_http=true", keys[0], keys[1], keys[2]];
    let (state, checkpointer) = (model(2)?, checkpointer(&options)?);
    let mut waits = Vec::new();
    for _ in 0..2 {
        let start = Instant::now();
        checkpointer.save(&state, "s3://bench/ours").await?;
        waits.push(start.elapsed().as_secs());
    }
    let (store, memory) = (store("bench", &options)?, Bytes::from(vec![7; 2 * TENSOR_BYTES]));
    let start = Instant::now();
    raw_save(&*store, &memory).await?;
    Ok(json!({ "first": waits[0], "overwrite": waits[1], "alone": start.elapsed().as_secs() }))
}

/// Eight ranks saved, six load: the bytes that cross the network, and those that are needed.
async fn reshard(double: &GcsDouble, storages: &StorageRegistry) -> Result<Value> {
    const SHAPE: [u64; 2] = [4800, 256];
    const TENSORS: usize = 8;
    let url = "gs://bench/eight";
    let ranks = dcp::collectives::LocalGroup::new(8).build();
    let saves = ranks.into_iter().enumerate().map(|(rank, group)| {
        let checkpointer = Checkpointer::in_group(Arc::new(group)).storages(storages.clone());
        async move {
            checkpointer.save(&part(rank as u64, 8, TENSORS, SHAPE)?, url).await?;
            Ok::<_, Box<dyn Error + Send + Sync>>(())
        }
    });
    futures_util::future::try_join_all(saves).await?;
    double.clear();
    let checkpointer = Checkpointer::new().storages(storages.clone());
    let mut needed = 0;
    for rank in 0..6 {
        let mut state = part(rank, 6, TENSORS, SHAPE)?;
        needed += checkpointer.load(&mut state, url).await?.read.bytes_needed;
    }
    Ok(traffic(double.traffic(), needed))
}

/// The rows of a rank, of tensors that are divided along their first axis.
fn part(rank: u64, ranks: u64, tensors: usize, shape: [u64; 2]) -> Result<StateDict> {
    let rows = shape[0] / ranks;
    let mut state = StateDict::new();
    for number in 0..tensors {
        let region = Region::new([rank * rows, 0], [rows, shape[1]])?;
        let tensor = Tensor::zeros_sharded(DType::Float32, shape, [region])?;
        state.insert(format!("layers.{number}"), tensor);
    }
    Ok(state)
}

fn traffic(traffic: HttpTraffic, needed: u64) -> Value {
    json!({
        "requests": traffic.requests,
        "bytes": traffic.received_bytes,
        "bytes_needed": needed,
    })
}
