//! A queue of asynchronous saves, with finalizers for those that are complete.
//!
//! At every step each rank sends the step and its own result to the first rank, which compares them
//! and broadcasts one answer. So all ranks finalize a call, or drop a failed one, by the same answer;
//! ranks at different steps all get an error. A rank cannot finalize by its own state: a save that
//! is complete on this rank may be under way, or have failed, on another.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use dcp_core::error::{Phase, RankFailure};
use dcp_core::{CheckpointError, Collective, Rank, StateDict, StorageWriter};
use dcp_engine::{BackgroundSaver, Group, SaveHandle, StagedState};
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::error::MegatronError;

/// Saves under way, in the order in which they were scheduled: Megatron-Core's `AsyncCallsQueue`.
///
/// Every rank has one, schedules the same saves in the same order, and polls, once an
/// iteration, say, whether any is complete ([`maybe_finalize`](Self::maybe_finalize)). A save is
/// complete when it is on all ranks; then its finalizers run, in their order, each on all ranks
/// before the next one, and only after every save that was scheduled before has been finalized. So
/// this is the order of what an [`async_save`](crate::async_save) makes visible: data, `.metadata`,
/// `integrity.json`, `metadata.json`, and then what the caller adds, such as the
/// [tracker](crate::write_tracker).
///
/// A save that fails, whether its storage failed, a rank was lost, or its task panicked, is an error
/// of the `maybe_finalize` that finds it, on every rank; none of its finalizers runs, so nothing
/// names it as the latest. (Megatron-Core does not look at the exit status of its workers.)
///
/// The ranks of a queue talk over a group of its own, not the one that the saves or training use.
/// A future of its methods must be awaited to its end; dropping one ends the group.
///
/// ```
/// # use std::sync::Arc;
/// # use dcp_conformance::MemoryStorage;
/// # use dcp_core::{Storage, Value};
/// use dcp_megatron::sharded::ShardedStateDict;
/// use dcp_megatron::{AsyncCallsQueue, AsyncRequest, MegatronBackgroundSaver, MegatronRun, MegatronSaveOptions, Tracked, async_save, write_tracker};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), dcp_megatron::MegatronError> {
/// # let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
/// # let state = ShardedStateDict::from([("step", Value::Int(10))]);
/// // Once: in a job of several ranks, each of the three with a group of its own.
/// let options = MegatronSaveOptions::new();
/// let background = MegatronBackgroundSaver::new(None);
/// let mut queue = AsyncCallsQueue::new(None);
///
/// // At iteration 10:
/// let folder = MegatronRun::new(Arc::clone(&storage)).checkpoint(Tracked::Iteration(10))?;
/// let save = async_save(&state, &folder, &options, &background).await?;
/// let mut request = AsyncRequest::started(save);
/// let tracker = Arc::clone(&storage);
/// request.add_finalize_fn(async move || write_tracker(&*tracker, Tracked::Iteration(10)).await);
/// queue.schedule_async_request(request).await?;
///
/// // … training, and once an iteration:
/// queue.maybe_finalize(false).await?;
/// // … and in the end:
/// queue.close().await?;
/// # assert_eq!(MegatronRun::new(storage).tracked().await?, Some(Tracked::Iteration(10)));
/// # Ok(())
/// # }
/// ```
pub struct AsyncCallsQueue {
    collective: Option<Arc<dyn Collective>>,
    /// Between two steps, the group of the last one.
    group: Option<Group>,
    calls: VecDeque<Call>,
    next: u64,
    /// Finalized calls that an error kept from being reported.
    untold: Vec<u64>,
}

/// A save to schedule, and what is to be done when it is complete.
pub struct AsyncRequest {
    preload: Preload,
    finalizers: Vec<Finalizer>,
}

type Preload = Box<dyn FnOnce() -> Result<Begin, CheckpointError> + Send>;

/// Work to begin, or that has begun.
enum Begin {
    Now(Box<dyn FnOnce() -> Work + Send>),
    Begun(Work),
}

type Finalizer = Box<dyn FnOnce() -> BoxFuture<'static, Result<(), MegatronError>> + Send>;

/// A save that was scheduled.
struct Call {
    number: u64,
    work: Work,
    /// The result on this rank, once the save has ended here.
    outcome: Option<Outcome>,
    finalizers: Vec<Finalizer>,
}

enum Work {
    Save(SaveHandle),
    Task(JoinHandle<Result<(), CheckpointError>>),
}

/// The step that a rank is at. Ranks at different steps call out of order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Step {
    Schedule(u64),
    Finish(u64),
    /// A call, and which of its finalizers.
    Finalize(u64, u32),
}

/// The failures by rank: [`RankFailure::into_parts`] of each.
type Failures = Vec<(Rank, String, String)>;

type Outcome = Result<(), Failures>;

/// A rank's message at a step: the step, the number of its finalizers for this call, and whether
/// the call is done here, or how it failed. Fields have no names, for this is sent once an
/// iteration.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Word(Step, u32, Result<bool, Failures>);

/// The coordinator's answer to the messages of all ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Answer {
    /// All are done; so many finalizers the rank with the most has.
    Done(u32),
    NotYet,
    Failed(Failures),
    /// The steps of the coordinator and of another rank, and which rank that is.
    Unmatched(String, String, Rank),
}

impl AsyncRequest {
    /// To save `state` through `writer`. The state is copied when the request is scheduled; until
    /// then it shares its memory.
    #[must_use]
    pub fn save(saver: &BackgroundSaver, state: StateDict, writer: Arc<dyn StorageWriter>) -> Self {
        let saver = saver.clone();
        Self::new(Box::new(move || {
            let staged = StagedState::of(&state)?;
            Ok(Begin::Now(Box::new(move || Work::Save(saver.start_staged(staged, writer)))))
        }))
    }

    /// To follow a save that has been started, as [`async_save`](crate::async_save) does. When it
    /// cannot be scheduled it is aborted, for nothing would wait for it or finalize it.
    #[must_use]
    pub fn started(save: SaveHandle) -> Self {
        Self::new(Box::new(move || Ok(Begin::Begun(Work::Save(save)))))
    }

    /// To do anything else in the background: `preload` is called when the request is scheduled,
    /// and when it has succeeded on all ranks, what it returned is run.
    #[must_use]
    pub fn task<F>(preload: impl FnOnce() -> Result<F, CheckpointError> + Send + 'static) -> Self
    where
        F: Future<Output = Result<(), CheckpointError>> + Send + 'static,
    {
        Self::new(Box::new(move || {
            let task = preload()?;
            Ok(Begin::Now(Box::new(move || Work::Task(tokio::spawn(task)))))
        }))
    }

    fn new(preload: Preload) -> Self {
        Self { preload, finalizers: Vec::new() }
    }

    /// Adds something to do when the save is complete on all ranks, after all that was added
    /// before. Ranks need not have the same number of them.
    pub fn add_finalize_fn<F, R>(&mut self, finalize: F) -> &mut Self
    where
        F: FnOnce() -> R + Send + 'static,
        R: Future<Output = Result<(), MegatronError>> + Send + 'static,
    {
        self.finalizers.push(Box::new(move || Box::pin(finalize())));
        self
    }
}

impl AsyncCallsQueue {
    /// An empty queue of the ranks of `collective`, or of this process alone.
    #[must_use]
    pub fn new(collective: Option<Arc<dyn Collective>>) -> Self {
        let calls = VecDeque::new();
        Self { collective, group: None, calls, next: 0, untold: Vec::new() }
    }

    /// Copies the state of a save, and begins it when all ranks have copied theirs. Returns the
    /// number of the call, which counts from 1. Must be called within a tokio runtime, on all
    /// ranks.
    ///
    /// # Errors
    ///
    /// [`MegatronError::AsyncCall`] on every rank when any cannot copy its state, and
    /// [`MegatronError::UnmatchedCalls`] on every rank when ranks are at different calls. Nothing
    /// is then begun, and what [had been](AsyncRequest::started) is aborted.
    pub async fn schedule_async_request(
        &mut self,
        request: AsyncRequest,
    ) -> Result<u64, MegatronError> {
        let number = self.next + 1;
        let (begin, done) = match (request.preload)() {
            Ok(begin) => (Some(begin), Ok(true)),
            Err(error) => (None, Err(self.failures(error.into()))),
        };
        if let Err(error) = self.say(Step::Schedule(number), 0, done).await {
            if let Some(Begin::Begun(work)) = begin {
                work.abort();
            }
            return Err(error);
        }
        self.next = number;
        if let Some(begin) = begin {
            let finalizers = request.finalizers;
            let work = match begin {
                Begin::Now(begin) => begin(),
                Begin::Begun(work) => work,
            };
            self.calls.push_back(Call { number, work, outcome: None, finalizers });
        }
        Ok(number)
    }

    /// Finalizes every save that is complete on all ranks, as far as none before it is under way,
    /// and returns their numbers. With `blocking`, waits for all. Called on all ranks. While a save
    /// is under way, it costs a few bytes from each rank to the first one and back.
    ///
    /// # Errors
    ///
    /// [`MegatronError::AsyncCall`] on every rank when the save or a finalizer failed on any: the
    /// finalizers after that do not run, and the save is not in the queue any more; those after it
    /// are. The error has the numbers of those before it that were finalized.
    /// [`MegatronError::UnmatchedCalls`] on every rank when ranks are at different calls; what was
    /// finalized until then is returned by the next call that succeeds.
    pub async fn maybe_finalize(&mut self, blocking: bool) -> Result<Vec<u64>, MegatronError> {
        match self.finalize(blocking).await {
            Ok(()) => Ok(std::mem::take(&mut self.untold)),
            Err(MegatronError::AsyncCall { call, failures, .. }) => {
                let finalized = std::mem::take(&mut self.untold);
                Err(MegatronError::AsyncCall { call, failures, finalized })
            }
            Err(error) => Err(error),
        }
    }

    async fn finalize(&mut self, blocking: bool) -> Result<(), MegatronError> {
        while let Some((call, finalizers, done)) = self.look(blocking).await {
            let functions = match self.say(Step::Finish(call), finalizers, done).await {
                Ok(Some(functions)) => functions,
                Ok(None) => break,
                Err(error) => {
                    if matches!(error, MegatronError::AsyncCall { .. }) {
                        self.calls.pop_front();
                    }
                    return Err(error);
                }
            };
            let Some(head) = self.calls.pop_front() else { break };
            let mut mine = head.finalizers.into_iter();
            for function in 0..functions {
                let done = match mine.next() {
                    Some(finalize) => finalize().await.map_err(|error| self.failures(error)),
                    None => Ok(()),
                };
                let done = done.map(|()| true);
                self.say(Step::Finalize(call, function), 0, done).await?;
            }
            self.untold.push(call);
        }
        Ok(())
    }

    /// Returns the state of the first call on this rank: its number, the number of its finalizers,
    /// and whether it is done. With `wait`, waits until it is.
    async fn look(&mut self, wait: bool) -> Option<(u64, u32, Result<bool, Failures>)> {
        let rank = self.rank();
        let head = self.calls.front_mut()?;
        if head.outcome.is_none() && (wait || head.work.is_finished()) {
            let ended = head.work.end().await;
            head.outcome = Some(ended.map_err(|error| failures(rank, error.into())));
        }
        let done = head.outcome.clone().map_or(Ok(false), |outcome| outcome.map(|()| true));
        Some((head.number, u32::try_from(head.finalizers.len()).unwrap_or(u32::MAX), done))
    }

    fn rank(&self) -> Rank {
        self.collective.as_ref().map_or(0, |collective| collective.rank())
    }

    fn failures(&self, error: MegatronError) -> Failures {
        failures(self.rank(), error)
    }

    /// The saves that were scheduled and not finalized yet.
    #[must_use]
    #[doc(alias = "get_num_unfinalized_calls")]
    pub fn unfinalized_calls(&self) -> usize {
        self.calls.len()
    }

    /// Waits for all saves and finalizes them. Called on all ranks.
    ///
    /// # Errors
    ///
    /// The first one, as [`maybe_finalize`](Self::maybe_finalize); the saves after it are finalized
    /// all the same, and the error has the numbers of all that were.
    pub async fn close(mut self) -> Result<Vec<u64>, MegatronError> {
        let mut first = None;
        let mut finalized = Vec::new();
        while !self.calls.is_empty() {
            match self.maybe_finalize(true).await {
                Ok(numbers) => finalized.extend(numbers),
                Err(error) => {
                    let goes_on = match &error {
                        MegatronError::AsyncCall { finalized: before, .. } => {
                            finalized.extend(before);
                            true
                        }
                        _ => false,
                    };
                    first.get_or_insert(error);
                    if !goes_on {
                        break;
                    }
                }
            }
        }
        match first {
            None => Ok(finalized),
            Some(MegatronError::AsyncCall { call, failures, .. }) => {
                Err(MegatronError::AsyncCall { call, failures, finalized })
            }
            Some(error) => Err(error),
        }
    }

    /// Gives up all saves that are not finalized. Called on all ranks; nothing is waited for.
    ///
    /// One that has just been committed may stay as a whole checkpoint; no finalizer runs.
    #[doc(alias = "close")]
    pub fn abort(mut self) {
        for call in self.calls.drain(..) {
            call.work.abort();
        }
    }

    /// Compares what all ranks say at a step: the largest number of finalizers when all are done,
    /// `None` when one is not, and on every rank the same error when one failed.
    async fn say(
        &mut self,
        step: Step,
        finalizers: u32,
        done: Result<bool, Failures>,
    ) -> Result<Option<u32>, MegatronError> {
        let (Step::Schedule(call) | Step::Finish(call) | Step::Finalize(call, _)) = step;
        // While it is away from the queue, whatever ends this early ends the group.
        let group = match self.group.take() {
            Some(group) => group,
            None => Group::new(self.collective.clone(), 0)?,
        };
        let words = group.gather_results(Phase::Commit, Ok(Word(step, finalizers, done))).await?;
        let answer = words.map(|words| words.map(|words| (Answer::to(words), ())));
        let (answer, _) = group.broadcast_result(Phase::Commit, answer).await?;
        self.group = Some(group);
        match answer {
            Answer::Done(functions) => Ok(Some(functions)),
            Answer::NotYet => Ok(None),
            Answer::Failed(failed) => {
                let failures = failed.into_iter().map(RankFailure::from_parts);
                let (failures, finalized) = (failures.collect(), Vec::new());
                Err(MegatronError::AsyncCall { call, failures, finalized })
            }
            Answer::Unmatched(left, right, right_rank) => {
                Err(MegatronError::UnmatchedCalls { left, left_rank: 0, right, right_rank })
            }
        }
    }
}

impl Answer {
    fn to(words: Vec<Word>) -> Self {
        if let Some(Word(first, ..)) = words.first() {
            let mut others = words.iter().zip(0..);
            if let Some((Word(other, ..), rank)) = others.find(|(word, _)| word.0 != *first) {
                return Self::Unmatched(first.to_string(), other.to_string(), rank);
            }
        }
        if words.iter().any(|Word(.., done)| *done == Ok(false)) {
            return Self::NotYet;
        }
        let functions = words.iter().map(|Word(_, finalizers, _)| *finalizers).max();
        let mut failed: Vec<_> =
            words.into_iter().filter_map(|Word(.., done)| done.err()).flatten().collect();
        // Ranks that fail together report the same.
        failed.sort();
        failed.dedup();
        if failed.is_empty() { Self::Done(functions.unwrap_or(0)) } else { Self::Failed(failed) }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Schedule(call) => write!(f, "scheduling call {call}"),
            Self::Finish(call) => write!(f, "looking whether call {call} is complete"),
            Self::Finalize(call, function) => {
                write!(f, "in finalizer {} of call {call}", function + 1)
            }
        }
    }
}

impl Work {
    fn is_finished(&self) -> bool {
        match self {
            Self::Save(save) => save.is_finished(),
            Self::Task(task) => task.is_finished(),
        }
    }

    /// Waits for the end. Not to be called again after that.
    async fn end(&mut self) -> Result<(), CheckpointError> {
        match self {
            Self::Save(save) => save.ended().await.map(|_| ()),
            Self::Task(task) => match task.await {
                Ok(result) => result,
                Err(error) if error.is_cancelled() => Err(CheckpointError::Canceled),
                Err(error) => Err(CheckpointError::Background {
                    problem: format!("the task did not finish: {error}"),
                    source: None,
                }),
            },
        }
    }

    fn abort(&self) {
        match self {
            Self::Save(save) => save.cancel(),
            Self::Task(task) => task.abort(),
        }
    }
}

/// Lists a rank's error as failures; an error that lists ranks already is not wrapped again.
fn failures(rank: Rank, error: MegatronError) -> Failures {
    match error {
        MegatronError::Checkpoint(CheckpointError::Ranks { failures, .. }) => {
            failures.into_iter().map(RankFailure::into_parts).collect()
        }
        other => vec![RankFailure::of(rank, &other).into_parts()],
    }
}

impl Drop for AsyncCallsQueue {
    fn drop(&mut self) {
        if let Some(group) = self.group.take().filter(|_| !std::thread::panicking()) {
            group.conclude(&Ok(()));
        }
        if !self.calls.is_empty() && !std::thread::panicking() {
            let calls = self.calls.len();
            tracing::warn!(calls, "saves were scheduled and never finalized; close the queue");
        }
    }
}

impl fmt::Debug for AsyncCallsQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncCallsQueue")
            .field("calls", &self.calls.iter().map(|call| call.number).collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for AsyncRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncRequest")
            .field("finalizers", &self.finalizers.len())
            .finish_non_exhaustive()
    }
}
