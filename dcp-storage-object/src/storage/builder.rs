//! The settings of a storage.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dcp_core::StorageError;
use object_store::ObjectStore;
use tokio::sync::Semaphore;

use crate::inner::{Inner, PERMIT_BYTES};
use crate::native::{Completion, OpenUploads, Replacement};
use crate::path::Prefix;
use crate::provider::Provider;
use crate::retry::RetryPolicy;
use crate::storage::ObjectStorage;

/// A longer deadline is no time of a clock: 136 years.
const DEADLINE_MAX: Duration = Duration::from_secs(u32::MAX as u64);

/// Settings of an [`ObjectStorage`], from [`ObjectStorage::builder`].
#[derive(Debug)]
#[must_use]
pub struct ObjectStorageBuilder {
    store: Arc<dyn ObjectStore>,
    prefix: String,
    provider: Provider,
    coalesce_gap: Option<u64>,
    request_bytes: u64,
    parallelism: Option<u16>,
    bytes_in_flight: u64,
    part_bytes: Option<u64>,
    retry: RetryPolicy,
    stall: Duration,
    hedge: Option<Duration>,
    writable: bool,
    conditional_writes: bool,
    pub(crate) completion: Option<Arc<dyn Completion>>,
    pub(crate) replacement: Option<Arc<dyn Replacement>>,
    pub(crate) open_uploads: Option<Arc<dyn OpenUploads>>,
}

impl ObjectStorageBuilder {
    pub(crate) fn new(store: Arc<dyn ObjectStore>) -> Self {
        let provider = Provider::of(&store);
        Self {
            store,
            prefix: String::new(),
            provider,
            coalesce_gap: None,
            request_bytes: 8 << 20,
            parallelism: None,
            bytes_in_flight: 256 << 20,
            part_bytes: None,
            retry: RetryPolicy { deadline: Duration::from_secs(180), attempts_max: 10 },
            stall: Duration::from_secs(30),
            hedge: None,
            writable: true,
            conditional_writes: true,
            completion: None,
            replacement: None,
            open_uploads: None,
        }
    }

    /// The folder of the store in which all keys are. By default, its root.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The service behind the store, where its name (`Display`) does not say it.
    pub fn provider(mut self, provider: Provider) -> Self {
        self.provider = provider;
        self
    }

    /// Ranges with a gap of at most this many bytes are read by one request. By default 128
    /// KiB.
    pub fn coalesce_gap(mut self, bytes: u64) -> Self {
        self.coalesce_gap = Some(bytes);
        self
    }

    /// The largest number of bytes of one request; longer ranges are divided. By default 8 MiB.
    pub fn request_bytes(mut self, bytes: u64) -> Self {
        self.request_bytes = bytes.max(1);
        self
    }

    /// The number of requests of one call that are in flight. By default 32, and 16 at a web server.
    pub fn parallelism(mut self, requests: u16) -> Self {
        self.parallelism = Some(requests.max(1));
        self
    }

    /// The number of bytes that all requests in flight may read together. By default 256 MiB.
    pub fn bytes_in_flight(mut self, bytes: u64) -> Self {
        self.bytes_in_flight = bytes;
        self
    }

    /// The preferred length of a part of an upload. By default 16 MiB.
    pub fn part_bytes(mut self, bytes: u64) -> Self {
        self.part_bytes = Some(bytes);
        self
    }

    /// The time for which one request is repeated before it fails. By default 3 minutes. Writes have one
    /// second more for each MiB, and the answer to a read for each KiB.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.retry.deadline = deadline.min(DEADLINE_MAX);
        self
    }

    /// The largest number of attempts at one request. By default 10. A store may repeat requests
    /// by itself, which is not counted.
    pub fn attempts_max(mut self, attempts: u32) -> Self {
        self.retry.attempts_max = attempts;
        self
    }

    /// The time for which an answer may send nothing, or less than a KiB per second, before the rest of it
    /// is requested again. By default 30 seconds.
    pub fn stall_timeout(mut self, timeout: Duration) -> Self {
        self.stall = timeout;
        self
    }

    /// Makes a request for a range again when nothing of its answer came for so long, and takes
    /// whichever answer comes first. By default, requests are not made twice.
    ///
    /// Single answers of object stores take many times as long as most. A time that 95 of 100
    /// requests need less than costs few requests.
    pub fn hedge_after(mut self, time: Duration) -> Self {
        self.hedge = Some(time);
        self
    }

    /// Whether objects can be written and deleted. By default they can, except on web servers.
    pub fn writable(mut self, writable: bool) -> Self {
        self.writable = writable;
        self
    }

    /// Whether the store checks conditions of writes, as by default. Without them, a creation looks
    /// whether the object exists and then writes it, so that of concurrent creators the last wins.
    pub fn conditional_writes(mut self, conditional: bool) -> Self {
        self.conditional_writes = conditional;
        self
    }

    /// The storage.
    ///
    /// # Errors
    ///
    /// [`Invalid`](dcp_core::StorageErrorKind::Invalid) for a prefix that is not a path.
    pub fn build(self) -> Result<ObjectStorage, StorageError> {
        let mut capabilities = self.provider.capabilities();
        capabilities.coalesce_gap = self.coalesce_gap.unwrap_or(capabilities.coalesce_gap);
        capabilities.parallelism = self.parallelism.unwrap_or(capabilities.parallelism);
        if let Some(bytes) = self.part_bytes {
            let limits = &mut capabilities.write_limits;
            limits.part_bytes = bytes.clamp(limits.part_bytes_min, limits.part_bytes_max);
        }
        if !self.writable {
            capabilities.writable = false;
        }
        if !self.writable || !self.conditional_writes {
            capabilities.atomic_create = false;
            capabilities.conditional_put = false;
            capabilities.claims = false;
        }
        let permits = usize::try_from(self.bytes_in_flight / PERMIT_BYTES).unwrap_or(usize::MAX);
        // One request is always possible. `acquire_many` takes a `u32`.
        let permits = permits.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Ok(ObjectStorage(Arc::new(Inner {
            prefix: Prefix::new(&self.prefix)?,
            store: self.store,
            provider: self.provider,
            capabilities,
            request_bytes: self.request_bytes,
            retry: self.retry,
            stall: self.stall,
            hedge: self.hedge,
            permits: Semaphore::new(permits),
            permits_max: u32::try_from(permits).unwrap_or(u32::MAX),
            completion: self.completion,
            replacement: self.replacement,
            open_uploads: self.open_uploads,
            bucket_seen: AtomicBool::new(false),
        })))
    }
}
