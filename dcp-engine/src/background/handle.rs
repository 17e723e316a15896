//! The handle of a background save.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use dcp_core::{CheckpointError, Rank};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

use super::background;
use super::worker::Shared;
use crate::event::{CheckpointEvent, CheckpointObserver, Operation};
use crate::summary::SaveSummary;

/// A save that is under way.
///
/// Dropping it lets the save go on unobserved: its error is logged, and returned by the next
/// [`BackgroundSaver::start`](crate::BackgroundSaver::start). Its methods need no runtime of tokio's.
#[derive(Debug)]
#[doc(alias = "AsyncSaveResponse")]
pub struct SaveHandle {
    slot: Arc<Slot>,
    /// Ends when the outcome is there.
    ended: Option<watch::Receiver<()>>,
    shared: Arc<Shared>,
}

/// The progress of a background save on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum SaveStage {
    /// The state is being copied. Training must not change it.
    #[default]
    Staging,
    /// The state is copied. Training may change it.
    Staged,
    /// All ranks agreed on a plan. This rank writes.
    Planned,
    /// All ranks have written their items durably.
    #[doc(alias = "upload_completion")]
    Written,
    /// The checkpoint is visible.
    Committed,
}

/// Bytes of this rank's items in a background save.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveProgress {
    /// Bytes that the writer of the format has received.
    pub done: u64,
    /// Bytes that this rank writes; 0 before the save is [planned](SaveStage::Planned).
    pub total: u64,
}

/// The outcome of a save, for its handle.
#[derive(Debug, Default)]
pub(super) struct Slot {
    state: Mutex<SlotState>,
    finished: Condvar,
    /// The stage, and whether the save has ended there.
    stage: watch::Sender<(SaveStage, bool)>,
    done: AtomicU64,
    total: AtomicU64,
}

#[derive(Debug, Default)]
struct SlotState {
    finished: bool,
    outcome: Option<Result<SaveSummary, CheckpointError>>,
    /// The outcome was returned.
    returned: bool,
    canceled: bool,
    /// The handle was dropped.
    dropped: bool,
    /// While the save runs.
    abort: Option<AbortHandle>,
}

/// The error of a save whose [`SaveHandle`] was dropped.
pub(super) type Unread = Arc<Mutex<Option<CheckpointError>>>;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the end of a save.
pub(super) async fn over(mut save: watch::Receiver<()>) {
    // Nothing is ever sent; the wait ends when the sender is dropped.
    while save.changed().await.is_ok() {}
}

impl SaveHandle {
    pub(super) fn new(
        slot: Arc<Slot>,
        ended: Option<watch::Receiver<()>>,
        shared: Arc<Shared>,
    ) -> Self {
        Self { slot, ended, shared }
    }

    /// The stage that the save has reached.
    #[must_use]
    pub fn stage(&self) -> SaveStage {
        self.slot.stage.borrow().0
    }

    /// Waits until the save has come to `stage`. Returns `false` if it ended before that.
    pub async fn reached(&self, stage: SaveStage) -> bool {
        let mut stages = self.slot.stage.subscribe();
        let over = stages.wait_for(|(at, ended)| *at >= stage || *ended).await;
        over.is_ok_and(|now| now.0 >= stage)
    }

    /// Waits until training may change the state: it is copied, or the save has failed.
    #[doc(alias = "staging_completion")]
    pub async fn staged(&self) {
        self.reached(SaveStage::Staged).await;
    }

    /// The bytes that this rank has written.
    #[must_use]
    pub fn progress(&self) -> SaveProgress {
        let total = self.slot.total.load(Ordering::Relaxed);
        // A writer may read an item more than once.
        let done = self.slot.done.load(Ordering::Relaxed).min(total);
        SaveProgress { done, total }
    }

    /// Waits for the end and returns the outcome.
    ///
    /// # Errors
    ///
    /// As [`Saver::save`](crate::Saver::save), [`CheckpointError::Canceled`] after
    /// [`cancel`](Self::cancel), and [`CheckpointError::Background`] when the save panicked.
    pub async fn wait(mut self) -> Result<SaveSummary, CheckpointError> {
        self.ended().await
    }

    /// Like [`wait`](Self::wait), by `&mut self`. Only the first call returns the outcome.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait), and when an earlier call returned the outcome.
    pub async fn ended(&mut self) -> Result<SaveSummary, CheckpointError> {
        if let Some(ended) = self.ended.clone() {
            over(ended).await;
            self.ended = None;
        }
        self.outcome()
    }

    /// Like [`wait`](Self::wait), on this thread, without a runtime. In a task, prefer
    /// [`wait`](Self::wait): this holds up the thread.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn blocking(self) -> Result<SaveSummary, CheckpointError> {
        self.slot.wait_until_finished();
        self.outcome()
    }

    fn outcome(&self) -> Result<SaveSummary, CheckpointError> {
        let mut state = lock(&self.slot.state);
        if state.returned {
            return Err(background("an earlier call returned the outcome".into()));
        }
        state.returned = true;
        let gone = || Err(background("the thread of the saves is gone".into()));
        state.outcome.take().unwrap_or_else(gone)
    }

    /// Cancels the save on all ranks by aborting its group. Unless the commit has begun, the place
    /// keeps the checkpoint that it had.
    pub fn cancel(&self) {
        let mut state = lock(&self.slot.state);
        state.canceled = true;
        if let Some(save) = state.abort.take() {
            save.abort();
        }
    }

    /// Whether the save has ended, well or not.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.slot.is_finished()
    }

    /// Discards the outcome.
    pub(super) fn silence(self) {
        lock(&self.slot.state).returned = true;
    }
}

impl Drop for SaveHandle {
    fn drop(&mut self) {
        let mut state = lock(&self.slot.state);
        state.dropped = true;
        state.pass_on(&self.shared.unread());
    }
}

impl Slot {
    /// Starts the save, unless it was canceled.
    pub(super) fn begin<F>(&self, save: F) -> Option<JoinHandle<F::Output>>
    where
        F: Future<Output = Result<SaveSummary, CheckpointError>> + Send + 'static,
    {
        let mut state = lock(&self.state);
        if state.canceled {
            return None;
        }
        let save = tokio::spawn(save);
        state.abort = Some(save.abort_handle());
        Some(save)
    }

    /// Stores the outcome for the handle, or without one for the next save.
    pub(super) fn finish(&self, result: Result<SaveSummary, CheckpointError>, unread: &Unread) {
        let mut state = lock(&self.state);
        state.abort = None;
        state.finished = true;
        state.outcome = Some(result);
        if state.dropped {
            state.pass_on(unread);
        }
        drop(state);
        self.finished.notify_all();
        self.stage.send_modify(|(_, ended)| *ended = true);
    }

    pub(super) fn is_finished(&self) -> bool {
        lock(&self.state).finished
    }

    pub(super) fn wait_until_finished(&self) {
        let mut state = lock(&self.state);
        while !state.finished {
            state = self.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl CheckpointObserver for Slot {
    fn observe(&self, _: Rank, event: &CheckpointEvent) {
        let stage = match event {
            CheckpointEvent::Staged { .. } => SaveStage::Staged,
            CheckpointEvent::Planned { operation: Operation::Save, bytes, .. } => {
                self.total.store(*bytes, Ordering::Relaxed);
                SaveStage::Planned
            }
            CheckpointEvent::Progress { bytes } => {
                self.done.fetch_add(*bytes, Ordering::Relaxed);
                return;
            }
            CheckpointEvent::Written { .. } => SaveStage::Written,
            CheckpointEvent::Committed { .. } => SaveStage::Committed,
            _ => return,
        };
        self.stage.send_modify(|(at, _)| *at = (*at).max(stage));
    }
}

impl SlotState {
    /// Stores a failure that no handle can return for the next save.
    fn pass_on(&mut self, unread: &Unread) {
        if let Some(Err(error)) = self.outcome.take()
            && !self.canceled
            && !self.returned
        {
            *lock(unread) = Some(error);
        }
    }
}
