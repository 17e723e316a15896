//! Readers that count, fail and take time, for readers around them.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, Rank, Region, Storage, StorageReader};
use dcp_formats::dcp::DcpReader;

pub(crate) fn reader(storage: &Arc<dyn Storage>) -> Arc<dyn StorageReader> {
    Arc::new(DcpReader::new(Arc::clone(storage)))
}

/// Notes how much of tensors of 32 bits is read, and how much at once.
#[derive(Debug)]
pub(crate) struct Probe {
    inner: Arc<dyn StorageReader>,
    bytes: AtomicU64,
    reads: AtomicU64,
    most: AtomicU64,
}

impl Probe {
    pub(crate) fn new(inner: Arc<dyn StorageReader>) -> Self {
        let [bytes, reads, most] = std::array::from_fn(|_| AtomicU64::default());
        Self { inner, bytes, reads, most }
    }

    /// The bytes of all reads.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The number of reads.
    pub(crate) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// The bytes of the largest read.
    pub(crate) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl StorageReader for Probe {
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
            ReadKind::Tensor { region, .. } => region.volume() * 4,
            _ => 0,
        };
        let bytes = plan.items.iter().map(|item| volume(&item.kind)).sum();
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.most.fetch_max(bytes, Ordering::Relaxed);
        self.inner.read(metadata, plan, sink).await
    }
}

/// Who finds in memory what one rank of a machine has read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Keeps {
    /// Every rank, as with a page cache.
    ForAll,
    /// That rank alone, as with a mount of its own.
    ForItself,
    /// None, as with an object store.
    Nothing,
}

/// Each kind of cache, and whether ranks that read at no cost from memory share their reads.
pub(crate) const CACHES: [(Keeps, bool); 3] =
    [(Keeps::ForAll, false), (Keeps::ForItself, true), (Keeps::Nothing, true)];

/// The parts of tensors that are in memory, and of which rank they are, if it keeps them for itself.
pub(crate) type Cache = Arc<Mutex<HashSet<(Option<Rank>, u32, u32, Region)>>>;

/// Takes a millisecond for each MiB that is not in memory, by the clock of the runtime.
#[derive(Debug)]
pub(crate) struct Paced {
    inner: Arc<dyn StorageReader>,
    keeps: Keeps,
    rank: Rank,
    cache: Cache,
}

impl Paced {
    pub(crate) fn new(
        inner: Arc<dyn StorageReader>,
        keeps: Keeps,
        rank: Rank,
        cache: &Cache,
    ) -> Self {
        Self { inner, keeps, rank, cache: Arc::clone(cache) }
    }

    /// Whether this part comes from the storage.
    fn is_cold(&self, entry: u32, chunk: u32, region: &Region) -> bool {
        let owner = match self.keeps {
            Keeps::ForAll => None,
            Keeps::ForItself => Some(self.rank),
            Keeps::Nothing => return true,
        };
        self.cache.lock().unwrap().insert((owner, entry, chunk, region.clone()))
    }
}

#[async_trait]
impl StorageReader for Paced {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.inner.metadata().await
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let cold = plan.items.iter().filter_map(|item| match &item.kind {
            ReadKind::Tensor { chunk, region, .. } => {
                self.is_cold(item.entry, *chunk, region).then(|| region.volume() * 4)
            }
            _ => None,
        });
        let bytes: u64 = cold.sum();
        tokio::time::sleep(Duration::from_millis(bytes >> 20)).await;
        self.inner.read(metadata, plan, sink).await
    }
}

/// Fails to read, or already to look at the index.
#[derive(Debug)]
pub(crate) struct Failing {
    pub(crate) inner: Arc<dyn StorageReader>,
    pub(crate) metadata: bool,
}

#[async_trait]
impl StorageReader for Failing {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        if self.metadata {
            return Err(CheckpointError::NotACheckpoint { message: "the disk is on fire".into() });
        }
        self.inner.metadata().await
    }

    async fn read(
        &self,
        _: &Arc<CheckpointMetadata>,
        _: &LoadPlan,
        _: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        Err(CheckpointError::NotACheckpoint { message: "the disk is on fire".into() })
    }
}
