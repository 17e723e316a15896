//! What it costs a rank to decide whether ranks share their reads, in a group of any size.
//!
//! `bench_sharing LAYOUT RANKS TENSORS`: this process is rank 0, which also divides reads, and the messages
//! of the others are made up from its own. LAYOUT is `sharded`, where each rank needs other rows,
//! `replicated`, where all need the same, or `hybrid`, where each 512th does. Prints a line of JSON.
//! `valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*ParallelReader*choose*'` counts the
//! instructions of the decision alone.
#![allow(clippy::print_stdout, reason = "a program that prints")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Collective, CollectiveError, DType, Region, StorageReader,
    TensorView, Value,
};
use dcp_engine::ParallelReader;

/// Rows and columns of each tensor.
const SHAPE: [u64; 2] = [16384, 1024];
/// Ranks of one machine.
const OF_MACHINE: u32 = 8;
/// Different plans of the layout `hybrid`.
const SHARDS: u32 = 512;

/// Rank 0 of a group whose other ranks say what this one does, about other plans and machines.
#[derive(Debug)]
struct Others {
    ranks: u32,
    shards: u32,
    sent: AtomicU64,
    received: AtomicU64,
}

impl Others {
    fn count(&self, sent: usize, received: usize) {
        self.sent.fetch_add(sent as u64, Ordering::Relaxed);
        self.received.fetch_add(received as u64, Ordering::Relaxed);
    }

    /// An offer of 40 bytes, of another plan and from another machine.
    fn offer(&self, mine: &Bytes, rank: u32) -> Bytes {
        let mut offer = mine.to_vec();
        if let (41, Some((plan, rest))) = (mine.len(), offer.split_first_chunk_mut::<4>()) {
            *plan = (u32::from_le_bytes(*plan) ^ (rank % self.shards)).to_le_bytes();
            if let Some(machine) = rest.get_mut(28..32) {
                machine.copy_from_slice(&(1 + rank / OF_MACHINE).to_le_bytes());
            }
        }
        offer.into()
    }
}

impl Collective for Others {
    fn rank(&self) -> u32 {
        0
    }

    fn world_size(&self) -> u32 {
        self.ranks
    }

    fn gather(&self, _: u32, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.count(0, mine.len());
        let others = (1..self.ranks).map(|_| Bytes::new());
        Ok(Some(std::iter::once(mine).chain(others).collect()))
    }

    fn scatter(&self, _: u32, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        let all = all.unwrap_or_default();
        self.count(all.iter().map(Bytes::len).sum(), 0);
        Ok(all.first().cloned().unwrap_or_default())
    }

    fn broadcast(&self, _: u32, mine: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        let mine = mine.unwrap_or_default();
        self.count(mine.len(), 0);
        Ok(mine)
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.count(mine.len(), mine.len() * self.ranks as usize);
        Ok((0..self.ranks).map(|rank| self.offer(&mine, rank)).collect())
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn abort(&self, _: &str) {}
}

/// Memory that nothing is read into.
#[derive(Debug)]
struct Nowhere;

impl DataSink for Nowhere {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        Err(item.unrequested().into())
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        Err(item.unrequested().into())
    }

    fn object(&self, item: &ReadItem, _: Value) -> Result<(), CheckpointError> {
        Err(item.unrequested().into())
    }
}

/// A reader that only a decision is made for.
#[derive(Debug)]
struct Unread(Arc<CheckpointMetadata>);

#[async_trait]
impl StorageReader for Unread {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.0))
    }

    async fn read(
        &self,
        _: &Arc<CheckpointMetadata>,
        _: &LoadPlan,
        _: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        Ok(ReadReport::default())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [layout, ranks, tensors] = &*args else {
        return Err("see the comment at the top of this example".into());
    };
    let (ranks, tensors): (u32, u32) = (ranks.parse()?, tensors.parse()?);
    let shards = match layout.as_str() {
        "sharded" => ranks,
        "replicated" => 1,
        "hybrid" => SHARDS,
        _ => return Err("LAYOUT is sharded, replicated or hybrid".into()),
    };
    let (mut metadata, mut plan) = (CheckpointMetadata::new(), LoadPlan::default());
    for at in 0..tensors {
        let mut tensor = TensorEntry::new(DType::BFloat16, SHAPE);
        tensor.chunks.push(&[0, 0], &SHAPE, None)?;
        metadata.insert(format!("layers.{at}.weight"), Entry::Tensor(tensor));
        let [rows, columns] = SHAPE;
        let region = Region::new([0, 0], [(rows / u64::from(shards)).max(1), columns])?;
        let kind = ReadKind::Tensor { chunk: 0, shard: 0, region };
        plan.items.push(ReadItem { entry: at, leaf: at, kind });
    }
    let metadata = Arc::new(metadata);
    let (sent, received) = (AtomicU64::default(), AtomicU64::default());
    let group = Arc::new(Others { ranks, shards, sent, received });
    let reader =
        ParallelReader::new(Arc::new(Unread(Arc::clone(&metadata))), Arc::clone(&group) as _)
            .replicas_only(true)
            // So that no time is measured, and nothing is exchanged after the decision.
            .speeds(u64::MAX, 1);
    let start = Instant::now();
    measured(&reader, &metadata, &plan)?;
    let seconds = start.elapsed().as_secs_f64();
    let [sent, received] =
        [&group.sent, &group.received].map(|bytes| bytes.load(Ordering::Relaxed));
    println!("{{\"seconds\": {seconds}, \"sent\": {sent}, \"received\": {received}}}");
    Ok(())
}

#[inline(never)]
fn measured(
    reader: &ParallelReader,
    metadata: &Arc<CheckpointMetadata>,
    plan: &LoadPlan,
) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(reader.read(metadata, plan, Arc::new(Nowhere)))?;
    Ok(())
}
