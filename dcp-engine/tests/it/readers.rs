//! Readers that count and fail, for readers around them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::{CheckpointError, CheckpointMetadata, Storage, StorageReader};
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
