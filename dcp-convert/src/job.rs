//! What all jobs share: how much memory they may take, and whom they tell.

use std::fmt;
use std::sync::Arc;

use dcp_planner::KeyFilter;

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
    /// Whether a job that writes only says what it would write: it reads the index, refuses what
    /// it would refuse, and stops before the first byte of data.
    pub dry_run: bool,
    /// What may be in objects that are written, though Python would run it when it loads them and
    /// it is not known to be harmless: names such as `my_code.config.Args`; nothing by default.
    pub callables: KeyFilter,
}

/// The least that [`JobOptions::max_memory`] is taken for, in bytes.
pub const MIN_MEMORY: u64 = 1 << 20;

impl Default for JobOptions {
    /// 256 MiB, four reads in flight, nobody told, and the work is done.
    fn default() -> Self {
        Self {
            max_memory: 256 << 20,
            parallelism: 4,
            progress: None,
            dry_run: false,
            callables: KeyFilter::any_of::<&str>([]),
        }
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

    /// The same, for a job that only says what it would write.
    #[must_use]
    pub fn as_dry_run(mut self, dry_run: bool) -> Self {
        self.dry_run = dry_run;
        self
    }

    /// The same, with these classes and functions of Python admitted in objects that are written.
    #[must_use]
    pub fn with_callables(mut self, callables: KeyFilter) -> Self {
        self.callables = callables;
        self
    }

    /// Bytes of one segment of a file that is written from front to back, of which as many as
    /// [`parallelism`](Self::parallelism) says are in flight: a quarter of the memory is theirs, the
    /// rest is for what is sent, 16 MiB at a time. Larger segments make nothing faster.
    pub(crate) fn write_segment_bytes(&self) -> u64 {
        const WORTH: u64 = 8 << 20;
        self.segment_bytes(self.parallelism.saturating_mul(4).max(8)).min(WORTH)
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
