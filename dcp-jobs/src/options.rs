//! Options that all jobs share: memory, parallelism, progress.

use std::fmt;
use std::sync::Arc;

use dcp_core::CheckpointError;
use dcp_planner::KeyFilter;

use crate::group::JobGroup;

/// Resources and permissions of a job.
#[derive(Clone)]
#[non_exhaustive]
pub struct JobOptions {
    /// Bytes of tensor data in memory at once, at least [`MIN_MEMORY`]. Tensors of any size pass
    /// through it in segments. Not counted: metadata, the storage's buffers, and for every read in
    /// flight one chunk that must be decoded (its stored bytes and its elements, up to 1 GiB).
    pub max_memory: u64,
    /// Reads in flight.
    pub parallelism: usize,
    /// Receives the job's progress.
    pub progress: Option<Arc<dyn JobProgress>>,
    /// Whether a writing job stops before the first byte of data. It still reads the index and
    /// refuses what a real run refuses.
    pub dry_run: bool,
    /// Python classes and functions that written objects may name although they are not known to be
    /// harmless, such as `my_code.config.Args`. Python runs them when it loads the target. Nothing
    /// by default.
    pub callables: KeyFilter,
    /// The processes that share the work, if there are several.
    pub group: Option<JobGroup>,
}

/// The lower bound of [`JobOptions::max_memory`], in bytes.
pub const MIN_MEMORY: u64 = 1 << 20;

impl Default for JobOptions {
    /// 256 MiB, four reads in flight, no progress, not a dry run.
    fn default() -> Self {
        Self {
            max_memory: 256 << 20,
            parallelism: 4,
            progress: None,
            dry_run: false,
            callables: KeyFilter::any_of::<&str>([]),
            group: None,
        }
    }
}

impl JobOptions {
    /// Sets [`max_memory`](Self::max_memory), in bytes.
    #[must_use]
    pub fn with_max_memory(mut self, bytes: u64) -> Self {
        self.max_memory = bytes;
        self
    }

    /// Sets [`parallelism`](Self::parallelism).
    #[must_use]
    pub fn with_parallelism(mut self, reads: usize) -> Self {
        self.parallelism = reads.max(1);
        self
    }

    /// Sets the receiver of progress.
    #[must_use]
    pub fn with_progress(mut self, progress: Arc<dyn JobProgress>) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Sets [`dry_run`](Self::dry_run).
    #[must_use]
    pub fn with_dry_run(mut self, dry_run: bool) -> Self {
        self.dry_run = dry_run;
        self
    }

    /// Sets the Python classes and functions that written objects may name.
    #[must_use]
    pub fn with_callables(mut self, callables: KeyFilter) -> Self {
        self.callables = callables;
        self
    }

    /// Sets the processes that share the work. All of them run the same job with the same options on
    /// the same checkpoint, and each does a part. Those that can be shared say so.
    #[must_use]
    pub fn with_group(mut self, group: impl Into<Option<JobGroup>>) -> Self {
        self.group = group.into();
        self
    }

    /// Whether this process commits and reports: it is alone, or rank 0 of its group.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        self.group.as_ref().is_none_or(JobGroup::is_coordinator)
    }

    /// These options for a job that rank 0 does alone; `None` on other ranks.
    #[must_use]
    pub fn of_coordinator(&self) -> Option<Self> {
        self.is_coordinator().then(|| self.of_one_rank())
    }

    /// These options for a part of the work that this rank does by itself. Only rank 0 has the progress,
    /// which is that of all.
    #[must_use]
    pub fn of_one_rank(&self) -> Self {
        let group = self.group.as_ref().map(JobGroup::of_one_rank);
        let progress = self.progress.clone().filter(|_| self.is_coordinator());
        Self { group, progress, ..self.clone() }
    }

    /// Fails when another rank of the group has failed or was lost.
    pub(crate) fn check_group(&self) -> Result<(), CheckpointError> {
        self.group.as_ref().map_or(Ok(()), JobGroup::check)
    }

    /// Bytes of one segment of a file that is written from front to back, read from a storage of which a
    /// request costs as much as `request_bytes` more. [`parallelism`](Self::parallelism) segments are in
    /// flight and share a quarter of the memory; another quarter is for data on its way to the storage,
    /// or two parts as long as the storage prefers them.
    ///
    /// Where requests are cheap, a segment fits into a processor's level-2 cache, in which its
    /// checksums are computed. Longer ones than the maximum are no faster from an object store.
    pub(crate) fn write_segment_bytes(&self, request_bytes: u64) -> u64 {
        const CACHED: u64 = 2 << 20;
        const LONGEST: u64 = 8 << 20;
        const REQUESTS_WORTH: u64 = 512;
        let worth = request_bytes.saturating_mul(REQUESTS_WORTH).clamp(CACHED, LONGEST);
        self.segment_bytes(self.parallelism.saturating_mul(4).max(8)).min(worth)
    }

    /// Bytes of a file on their way to the storage.
    pub(crate) fn upload_bytes(&self) -> u64 {
        self.max_memory.max(MIN_MEMORY) / 4
    }

    /// Bytes of one segment when `in_flight` segments are in memory at once: a multiple of every
    /// element size.
    pub(crate) fn segment_bytes(&self, in_flight: usize) -> u64 {
        let share = self.max_memory.max(MIN_MEMORY) / in_flight.max(1) as u64;
        (share & !0xffff).max(1 << 16)
    }

    /// Reports the bytes that all ranks will process.
    pub(crate) fn start(&self, total_bytes: u64) {
        let Some(progress) = self.progress.as_ref().filter(|_| self.is_coordinator()) else {
            return;
        };
        progress.start(total_bytes);
        if let Some(group) = &self.group {
            let progress = Arc::clone(progress);
            group.on_progress(move |bytes| progress.advance(bytes));
        }
    }

    pub(crate) fn advance(&self, bytes: u64) {
        match (&self.group, &self.progress) {
            (Some(group), _) => group.advance(bytes),
            (None, Some(progress)) => progress.advance(bytes),
            (None, None) => {}
        }
    }
}

impl fmt::Debug for JobOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobOptions")
            .field("max_memory", &self.max_memory)
            .field("parallelism", &self.parallelism)
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

/// Receives a job's progress. Calls come from any thread and must not block.
pub trait JobProgress: Send + Sync {
    /// The job starts and will process `total_bytes`.
    fn start(&self, total_bytes: u64);

    /// The job has processed `bytes` more.
    fn advance(&self, bytes: u64);
}
