//! Saving while training goes on.

mod handle;
mod worker;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use dcp_core::error::{Phase, RankFailure};
use dcp_core::{CheckpointError, StateDict, StorageWriter};
use tokio::sync::watch;

pub use self::handle::{SaveHandle, SaveProgress, SaveStage};
use self::handle::{Slot, Unread, over};
use self::worker::Shared;
use crate::event::{CheckpointEvent, CheckpointObserver};
use crate::save::Saver;
use crate::stage::{BlockingStager, StagedState, Stager, Staging};
use crate::summary::SaveSummary;

/// Saves in the background: a [`Stager`] copies the state, so that training may change it; planning,
/// writing and commit follow on a thread of the saver's own, with a runtime of its own. So it works
/// in any program: with a tokio runtime of any kind, and without one.
///
/// One save is under way at a time. What the next one does meanwhile is [`WhenBusy`]'s: it waits, by
/// default. Saves happen in the order of the calls, which is the same on all ranks. Give it a group
/// of its own, not the one that training uses.
///
/// Dropping the last of a saver, its clones and its [`SaveHandle`]s waits for the saves under way
/// (not in a thread that panics). The next `start` returns the error of a save whose [`SaveHandle`]
/// was dropped.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_conformance::MemoryStorage;
/// use dcp_core::{CheckpointError, DType, StateDict, Tensor};
/// use dcp_engine::{BackgroundSaver, SaveStage, Saver};
/// use dcp_formats::dcp::DcpWriter;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), CheckpointError> {
/// let weight = Tensor::zeros(DType::Float32, [4])?;
/// let state = StateDict::from([("weight", weight.clone())]);
/// let saver = BackgroundSaver::new(Saver::new());
///
/// let writer = Arc::new(DcpWriter::new(Arc::new(MemoryStorage::new())));
/// let saving = saver.start(&state, writer)?;
/// // The state is copied, so training may change it.
/// assert!(saving.stage() >= SaveStage::Staged);
/// weight.shards()[0].view().unwrap().lend().unwrap().fill(1);
/// assert_eq!(saving.wait().await?.entries, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[doc(alias = "AsyncCheckpointer")]
pub struct BackgroundSaver {
    saver: Saver,
    stager: Arc<dyn Stager>,
    shared: Arc<Shared>,
}

/// The behavior of a save that starts while an earlier one is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WhenBusy {
    /// It waits for the earlier one, before it copies the state. So there is one copy at most.
    #[default]
    Wait,
    /// It is skipped, on all ranks if the earlier one is under way on any.
    Skip,
    /// It copies the state and waits for its turn in the background. Each save in the queue has a
    /// copy of the state.
    Queue,
}

/// Opens the writer of a save.
type Opening =
    Pin<Box<dyn Future<Output = Result<Arc<dyn StorageWriter>, CheckpointError>> + Send>>;

/// A save to run, or the error in place of it.
type Job = Result<(Staging, Instant, Opening), CheckpointError>;

impl BackgroundSaver {
    /// Saves as `saver` does, whose settings also say how states are copied and where ranks agree to skip.
    #[must_use]
    pub fn new(saver: Saver) -> Self {
        let stager = saver.settings().stager.clone();
        let stager = stager.unwrap_or_else(|| Arc::new(BlockingStager::new()));
        Self { saver, stager, shared: Arc::default() }
    }

    /// Sets the name of the place of the saves in errors; see [`Saver::place`].
    #[must_use]
    pub fn place(&self, name: &str) -> Self {
        Self { saver: self.saver.clone().place(name), ..self.clone() }
    }

    /// Waits for the save under way, copies `state`, and starts to save the copy.
    ///
    /// # Errors
    ///
    /// When the state cannot be copied because some of its memory is lent for writing, or an
    /// earlier save failed and its [`SaveHandle`] was dropped; then this save is not started, on any
    /// rank, and the one after it can be. What fails later is returned by [`SaveHandle::wait`].
    #[doc(alias = "async_save")]
    pub fn start(
        &self,
        state: &StateDict,
        writer: Arc<dyn StorageWriter>,
    ) -> Result<SaveHandle, CheckpointError> {
        self.start_opening(state, async { Ok(writer) })
    }

    /// As [`start`](Self::start), with a writer that `open` returns on the thread of the saves. An
    /// error of it is one of the save, on all ranks.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn start_opening<F>(
        &self,
        state: &StateDict,
        open: F,
    ) -> Result<SaveHandle, CheckpointError>
    where
        F: Future<Output = Result<Arc<dyn StorageWriter>, CheckpointError>> + Send + 'static,
    {
        self.shared.wait_for_last();
        self.stage_and_run(state, Box::pin(open))
    }

    /// As [`start_opening`](Self::start_opening), with a choice of what happens while an earlier
    /// save is under way. Returns `None` for a save that is skipped.
    ///
    /// In a group, all ranks call it with the same choice. To skip they need a
    /// [`decision_group`](crate::Settings::decision_group).
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start), and when ranks cannot agree to skip.
    pub fn start_when<F>(
        &self,
        busy: WhenBusy,
        state: &StateDict,
        open: F,
    ) -> Result<Option<SaveHandle>, CheckpointError>
    where
        F: Future<Output = Result<Arc<dyn StorageWriter>, CheckpointError>> + Send + 'static,
    {
        if self.is_skipped(busy)? {
            return Ok(None);
        }
        self.stage_and_run(state, Box::pin(open)).map(Some)
    }

    /// Starts to save a copy that was made before, as after all ranks have agreed that theirs were.
    /// It waits for its turn in the background. Where [`start`](Self::start) returns the error of an
    /// earlier save, this save fails with it.
    #[must_use = "an error is only noticed by waiting"]
    pub fn start_staged(&self, staged: StagedState, writer: Arc<dyn StorageWriter>) -> SaveHandle {
        let open: Opening = Box::pin(async { Ok(writer) });
        let staging = Staging::complete(staged);
        self.run(self.earlier_failure().map_or(Ok((staging, Instant::now(), open)), Err))
    }

    /// Takes part in a save with an error in place of a state, as [`Saver::fail`] does.
    #[must_use = "an error is only noticed by waiting"]
    pub fn fail(&self, error: CheckpointError) -> SaveHandle {
        self.run(Err(error))
    }

    /// As [`fail`](Self::fail), on a rank that cannot call [`start_when`](Self::start_when) as the
    /// others do.
    ///
    /// # Errors
    ///
    /// `error` itself where the save is skipped on all ranks, and when ranks cannot agree to skip.
    pub fn fail_when(
        &self,
        busy: WhenBusy,
        error: CheckpointError,
    ) -> Result<SaveHandle, CheckpointError> {
        if self.is_skipped(busy)? { Err(error) } else { Ok(self.fail(error)) }
    }

    /// Copies a state, to [start](Self::start_staged) its save later.
    ///
    /// # Errors
    ///
    /// As [`Stager::stage`].
    pub async fn stage(&self, state: &StateDict) -> Result<StagedState, CheckpointError> {
        self.stager.stage(state)?.finish().await
    }

    /// Waits until the saves that were started so far are over, well or not. Another operation in
    /// the same group begins after that.
    pub async fn settled(&self) {
        if let Some(ended) = self.shared.last_ended() {
            over(ended).await;
        }
    }

    /// The error of an earlier save whose [`SaveHandle`] was dropped; once. The next save, of
    /// whatever kind, fails with it.
    #[must_use]
    pub fn earlier_failure(&self) -> Option<CheckpointError> {
        let earlier = self.shared.take_unread()?;
        let problem = "an earlier background save failed, so this save was not started";
        Some(CheckpointError::Background {
            problem: problem.into(),
            source: Some(Box::new(earlier)),
        })
    }

    /// Whether a save is skipped, on all ranks; waits for an earlier one if `busy` says so.
    fn is_skipped(&self, busy: WhenBusy) -> Result<bool, CheckpointError> {
        match busy {
            WhenBusy::Wait => self.shared.wait_for_last(),
            WhenBusy::Skip => return self.is_busy_anywhere(),
            WhenBusy::Queue => {}
        }
        Ok(false)
    }

    fn is_busy_anywhere(&self) -> Result<bool, CheckpointError> {
        let busy = self.shared.is_busy();
        match self.saver.settings().decision_collective() {
            Some(group) => {
                let all = group.all_gather(vec![u8::from(busy)].into())?;
                Ok(all.iter().any(|rank| rank[..] != [0]))
            }
            None if self.saver.settings().world_size() == 1 => Ok(busy),
            None => Err(background(
                "to skip saves, ranks need a group to agree in; set Settings::decision_group"
                    .into(),
            )),
        }
    }

    fn stage_and_run(
        &self,
        state: &StateDict,
        open: Opening,
    ) -> Result<SaveHandle, CheckpointError> {
        let started = Instant::now();
        match self.earlier_failure().map_or_else(|| self.stager.stage(state), Err) {
            Ok(staging) => Ok(self.run(Ok((staging, started, open)))),
            Err(error) => {
                // In place of a save, so that the other ranks do not wait for it.
                let failures = vec![RankFailure::of(self.saver.settings().rank(), &error)];
                self.run(Err(CheckpointError::Ranks { phase: Phase::Plan, failures })).silence();
                Err(error)
            }
        }
    }

    fn run(&self, job: Job) -> SaveHandle {
        let shared = Arc::clone(&self.shared);
        let slot = Arc::new(Slot::default());
        let runtime = match shared.runtime() {
            Ok(runtime) => runtime,
            Err(error) => {
                let problem = format!("there is no thread for it: {error}");
                slot.finish(Err(background(problem)), &shared.unread());
                return SaveHandle::new(slot, None, shared);
            }
        };
        let observer = Arc::clone(&slot) as Arc<dyn CheckpointObserver>;
        let saver = self.saver.clone().watched_by(observer);
        let job = match job {
            Ok((staging, started, open)) if staging.is_complete() => {
                saver.observe(&CheckpointEvent::Staged { duration: started.elapsed() });
                Ok((staging, started, open))
            }
            job => job,
        };
        // The turn is taken here and not in the task, because tasks may run in any order.
        let (done, turn) = watch::channel(());
        let before = shared.append(Arc::clone(&slot), turn.clone());
        // Not `shared`, whose last owner waits for this.
        let ending = Ending { slot: Arc::clone(&slot), unread: shared.unread() };
        runtime.spawn(async move {
            // A copy that is under way ends whether or not it is this save's turn.
            let job = staged(job, &saver).await;
            if let Some(before) = before {
                over(before).await;
            }
            let leaving = saver.clone();
            let result = match ending.slot.begin(async move { save(&saver, job).await }) {
                None => {
                    leaving.leave("a save was canceled before it started");
                    Err(CheckpointError::Canceled)
                }
                Some(save) => save.await.unwrap_or_else(|error| {
                    let canceled = error.is_cancelled();
                    let panicked = || background(error.to_string());
                    Err(if canceled { CheckpointError::Canceled } else { panicked() })
                }),
            };
            if let Err(error) = &result {
                tracing::error!(
                    error = dcp_core::error::error_chain(error),
                    "background save failed"
                );
            }
            ending.slot.finish(result, &ending.unread);
            drop((ending, done));
        });
        SaveHandle::new(slot, Some(turn), shared)
    }
}

/// Ends a save also when its task panics, such as in a stager.
#[derive(Debug)]
struct Ending {
    slot: Arc<Slot>,
    unread: Unread,
}

impl Drop for Ending {
    fn drop(&mut self) {
        if !self.slot.is_finished() {
            self.slot.finish(Err(background("its stager panicked".into())), &self.unread);
        }
    }
}

/// The job, when its copy is complete.
async fn staged(job: Job, saver: &Saver) -> Job {
    let (staging, started, open) = job?;
    if staging.is_complete() {
        return Ok((staging, started, open));
    }
    let staged = staging.finish().await?;
    saver.observe(&CheckpointEvent::Staged { duration: started.elapsed() });
    Ok((Staging::complete(staged), started, open))
}

async fn save(saver: &Saver, job: Job) -> Result<SaveSummary, CheckpointError> {
    let opened = async {
        let (staging, _, open) = job?;
        Ok((staging.finish().await?, open.await?))
    };
    match opened.await {
        Ok((staged, writer)) => saver.save(staged.state(), &*writer).await,
        Err(error) => Err(saver.fail(error).await),
    }
}

fn background(problem: String) -> CheckpointError {
    CheckpointError::Background { problem, source: None }
}
