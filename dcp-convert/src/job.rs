//! What all jobs share: where they read, how much memory they may take, whom they tell.

use std::fmt;
use std::sync::Arc;

use dcp_core::{CheckpointError, CheckpointMetadata, Key, Storage, StorageReader};
use dcp_formats::dcp::DcpReader;

use crate::decoded::DecodedOnce;
use crate::safetensors_file::SafetensorsFile;

/// A checkpoint to read: its format's reader, and the storage that holds its files.
#[derive(Clone, Debug)]
pub struct Source {
    /// The bytes, for sizes, checksums and objects that are copied as they are.
    pub storage: Arc<dyn Storage>,
    /// The meaning of the bytes.
    pub reader: Arc<dyn StorageReader>,
    /// The same reader, when it is PyTorch's format: it knows more than the trait asks for.
    pub(crate) dcp: Option<Arc<DcpReader>>,
}

impl Source {
    /// A checkpoint whose files lie in `storage` and are understood by `reader`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, reader: Arc<dyn StorageReader>) -> Self {
        Self { storage, reader, dcp: None }
    }

    /// A checkpoint in PyTorch's format. With `tolerant`, a damaged one can be looked at as far
    /// as it is whole; otherwise its index must be borne out by its files.
    #[must_use]
    pub fn dcp(storage: Arc<dyn Storage>, tolerant: bool) -> Self {
        let reader = DcpReader::builder(Arc::clone(&storage)).tolerant(tolerant).build();
        let reader = Arc::new(reader);
        let dcp = Some(Arc::clone(&reader));
        Self { storage, reader, dcp }
    }

    /// One safetensors file.
    #[must_use]
    pub fn safetensors(storage: Arc<dyn Storage>, key: Key) -> Self {
        let reader = SafetensorsFile::new(Arc::clone(&storage), key);
        Self::new(storage, Arc::new(reader))
    }

    /// The reader for a job of `parallelism` reads, which decodes no chunk for each of its parts.
    pub(crate) fn decoded_once(&self, parallelism: usize) -> Arc<dyn StorageReader> {
        Arc::new(DecodedOnce::new(Arc::clone(&self.reader), parallelism))
    }

    /// The checkpoint's index.
    ///
    /// # Errors
    ///
    /// When there is no checkpoint, or its index is bad.
    pub async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.reader.metadata().await
    }
}

/// How a job may use the machine.
#[derive(Clone)]
#[non_exhaustive]
pub struct JobOptions {
    /// Bytes of tensor data to hold at once, at least [`MIN_MEMORY`]; tensors of any size go
    /// through it in segments. What metadata and the buffers of the storage take comes on top,
    /// and so does, for every read in flight, a chunk that has to be decoded: its stored bytes
    /// and, until the next ones take their place, its elements (up to 1 GiB).
    pub max_memory: u64,
    /// Reads in flight.
    pub parallelism: usize,
    /// Told of every step.
    pub progress: Option<Arc<dyn Progress>>,
}

/// The least that [`JobOptions::max_memory`] is taken for, in bytes.
pub const MIN_MEMORY: u64 = 1 << 20;

impl Default for JobOptions {
    /// 256 MiB, four reads in flight, nobody told.
    fn default() -> Self {
        Self { max_memory: 256 << 20, parallelism: 4, progress: None }
    }
}

impl JobOptions {
    /// The same, holding at most `bytes` of tensor data at once.
    #[must_use]
    pub fn with_max_memory(mut self, bytes: u64) -> Self {
        self.max_memory = bytes;
        self
    }

    /// The same, with `reads` in flight.
    #[must_use]
    pub fn with_parallelism(mut self, reads: usize) -> Self {
        self.parallelism = reads.max(1);
        self
    }

    /// The same, telling `progress` of every step.
    #[must_use]
    pub fn with_progress(mut self, progress: Arc<dyn Progress>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Bytes of one segment when `in_flight` of them are held at once: a multiple of every
    /// element's size.
    pub(crate) fn segment_bytes(&self, in_flight: usize) -> u64 {
        let share = self.max_memory.max(MIN_MEMORY) / in_flight.max(1) as u64;
        (share & !0xffff).max(1 << 16)
    }

    pub(crate) fn start(&self, total_bytes: u64) {
        if let Some(progress) = &self.progress {
            progress.start(total_bytes);
        }
    }

    pub(crate) fn advance(&self, bytes: u64) {
        if let Some(progress) = &self.progress {
            progress.advance(bytes);
        }
    }
}

impl fmt::Debug for JobOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobOptions")
            .field("max_memory", &self.max_memory)
            .field("parallelism", &self.parallelism)
            .finish_non_exhaustive()
    }
}

/// Wants to know how far a job is. Called from any thread; must not block.
pub trait Progress: Send + Sync {
    /// The job has this many bytes to go through.
    fn start(&self, total_bytes: u64);

    /// So many more of them are done.
    fn advance(&self, bytes: u64);
}
