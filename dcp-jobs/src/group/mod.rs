//! The processes that do one job together: what each has done, what they exchange, how all fail as
//! one.

mod rounds;
pub(crate) mod share;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread;

use bytes::Bytes;
use dcp_core::digest::fnv1a_128;
use dcp_core::wire::MessageWriter;
use dcp_core::{CheckpointError, Collective, CollectiveError, Key, Rank};

use self::rounds::{Operation, Shared};
use self::share::contiguous_share;

/// The ranks of a job, each a process that does a part of it: see
/// [`JobOptions::with_group`](crate::JobOptions::with_group).
///
/// A thread calls the collective in rounds, at least ten in a second. In each, every rank reports its
/// progress, and whether it has failed. So the work of a rank may take hours, and a rank whose process
/// is gone, or does not answer within the deadline of the collective, is noticed meanwhile. What a
/// rank reports last is final: [`finish`](Self::finish).
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_jobs::group::{GroupEnd, JobGroup};
/// # use dcp_core::Collective;
/// # fn example(collective: Arc<dyn Collective>) -> Result<(), dcp_core::CheckpointError> {
/// let group = JobGroup::start(collective)?;
/// // Run jobs with `JobOptions::default().with_group(group.clone())`, then:
/// assert_eq!(group.finish(Ok(())), GroupEnd::Done);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct JobGroup {
    rank: Rank,
    world_size: u32,
    handle: Arc<Handle>,
}

/// The end of the work of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupEnd {
    /// All ranks have finished.
    Done,
    /// A rank failed; all ranks agree on which, the lowest of those that failed at the same time.
    Failed {
        /// The rank.
        rank: Rank,
        /// Why, as it reported to [`JobGroup::finish`].
        reason: String,
    },
    /// A rank was lost.
    Lost(CollectiveError),
}

/// Ends the rounds when the last clone of a group is dropped.
struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.report(Err("it ended without a result".to_owned()));
    }
}

/// The error of a rank whose plan is not that of rank 0.
pub(crate) fn other_plan() -> CollectiveError {
    let message = "it plans other files; give all ranks the same options, and paths of a file system \
                   that all of them share";
    CollectiveError::Mismatch { rank: 0, op: "the plan of a job", message: message.to_owned() }
}

impl JobGroup {
    /// Begins the rounds over `collective`, which nothing else may call.
    ///
    /// # Errors
    ///
    /// When the system has no thread for them.
    pub fn start(collective: Arc<dyn Collective>) -> Result<Self, CheckpointError> {
        let (rank, world_size) = (collective.rank(), collective.world_size());
        let shared = Arc::new(Shared::default());
        let thread = thread::Builder::new().name("dcp job group".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.run(&*collective)
        });
        let thread = thread.map_err(CheckpointError::application)?;
        *shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(Self { rank, world_size, handle: Arc::new(Handle(shared)) })
    }

    /// The rank of this process.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks, at least 1.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Whether this is the rank that commits and reports: rank 0.
    #[must_use]
    pub fn is_coordinator(&self) -> bool {
        self.rank == 0
    }

    /// This group for work of one rank by itself: it exchanges nothing, and still ends when a rank
    /// fails.
    #[must_use]
    pub(crate) fn of_one_rank(&self) -> Self {
        Self { rank: 0, world_size: 1, handle: Arc::clone(&self.handle) }
    }

    /// The items that this rank does, of items with these bytes: a contiguous range, so that all ranks
    /// have about the same number of bytes.
    #[must_use]
    pub fn share(&self, byte_lens: &[u64]) -> Range<usize> {
        contiguous_share(byte_lens, self.rank, self.world_size)
    }

    /// Refuses names of files to write that are not the same on all ranks. Then all ranks have looked
    /// at the target, and none has written yet.
    ///
    /// # Errors
    ///
    /// When they differ, and when a rank failed or was lost.
    pub async fn same_files<'a>(
        &self,
        names: impl Iterator<Item = &'a Key>,
    ) -> Result<(), CheckpointError> {
        let mut message = MessageWriter::new(*b"dwf1");
        names.for_each(|name| message.text(name.as_str()));
        let mine = fnv1a_128(&message.finish()).to_le_bytes();
        let all = self.all_gather(Bytes::copy_from_slice(&mine)).await?;
        if all.iter().any(|one| **one != mine) { Err(other_plan().into()) } else { Ok(()) }
    }

    /// After rank 0 has gathered what all ranks wrote: lets it commit that. A rank that fails before, or
    /// in here without [`has_handed_over`](Self::has_handed_over), removes what it wrote, because rank 0
    /// then commits nothing. After that only rank 0 does.
    ///
    /// Rank 0 first says that it has everything, so what it removes when the others fail was written
    /// before; then all agree.
    ///
    /// # Errors
    ///
    /// When a rank failed or was lost.
    pub async fn hand_over(&self) -> Result<(), CheckpointError> {
        self.broadcast(Bytes::new()).await?;
        self.handle.0.handed_over.store(true, Ordering::Relaxed);
        self.gather(Bytes::new()).await.map(drop)
    }

    /// Whether rank 0 may have committed what this rank wrote, so that only rank 0 may remove it.
    #[must_use]
    pub fn has_handed_over(&self) -> bool {
        !self.is_coordinator() && self.handle.0.handed_over.load(Ordering::Relaxed)
    }

    /// Sends every rank's message to rank 0, which receives them in the order of ranks; others
    /// receive `None`. All ranks make the same calls in the same order.
    ///
    /// # Errors
    ///
    /// When a rank failed or was lost.
    pub async fn gather(&self, mine: Bytes) -> Result<Option<Vec<Bytes>>, CheckpointError> {
        let all = self.exchange(Operation::Gather, mine).await?;
        Ok(self.is_coordinator().then_some(all))
    }

    /// Sends the message of rank 0 to all ranks; the others' are ignored.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    pub async fn broadcast(&self, from_coordinator: Bytes) -> Result<Bytes, CheckpointError> {
        let all = self.exchange(Operation::Broadcast, from_coordinator).await?;
        Ok(all.into_iter().next().unwrap_or_default())
    }

    /// Sends every rank's message to all ranks, in the order of ranks.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    pub async fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CheckpointError> {
        self.exchange(Operation::AllGather, mine).await
    }

    async fn exchange(
        &self,
        operation: Operation,
        mine: Bytes,
    ) -> Result<Vec<Bytes>, CheckpointError> {
        if self.world_size == 1 {
            self.check()?;
            return Ok(vec![mine]);
        }
        self.handle.0.exchange(operation, mine).await
    }

    /// Fails when a rank has failed or was lost, so that this one stops, too.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Collective`], which names the rank.
    pub fn check(&self) -> Result<(), CheckpointError> {
        if self.handle.0.broken.load(Ordering::Relaxed) {
            return Err(self.handle.0.end_as_error());
        }
        Ok(())
    }

    /// Counts `bytes` as processed by this rank.
    pub fn advance(&self, bytes: u64) {
        self.handle.0.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Sets the receiver of the bytes that all ranks process. Only rank 0 calls it.
    pub fn on_progress(&self, advance: impl Fn(u64) + Send + Sync + 'static) {
        self.handle.0.observe(Arc::new(advance));
    }

    /// Reports how the work of this rank ended, waits until all ranks have reported or one has failed,
    /// and returns how the group ended. A failure that another rank reported first stands.
    #[must_use]
    pub fn finish(&self, outcome: Result<(), String>) -> GroupEnd {
        self.handle.0.report(outcome);
        self.handle.0.wait()
    }
}

impl fmt::Debug for JobGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobGroup")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .finish_non_exhaustive()
    }
}
