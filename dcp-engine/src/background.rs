//! Saving while training goes on.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::{io, thread};

use dcp_core::error::{Phase, RankFailure};
use dcp_core::value::{Dict, Object};
use dcp_core::{
    CheckpointError, HostMemory, PlanError, Shard, StateDict, StorageWriter, Tensor, Value,
};
use tokio::runtime::{self, Handle};
use tokio::sync::{oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle};

use crate::save::{SaveSummary, Saver};

/// Saves in the background: the state is copied before [`start`](Self::start) returns, so that
/// training may change it at once; planning, writing and commit follow on a thread of the saver's
/// own, with a runtime of its own. So it works in any program: with a tokio runtime of any kind,
/// and without one.
///
/// Saves happen one after the other, in the order of the calls, which is the same on all ranks.
/// Give it a group of its own, not the one that training uses.
///
/// Dropping the last of a saver, its clones and its [`PendingSave`]s waits for the saves under way
/// (not in a thread that panics). The next `start` returns the error of a save whose [`PendingSave`]
/// was dropped.
#[derive(Clone, Debug)]
pub struct BackgroundSaver {
    saver: Saver,
    shared: Arc<Shared>,
}

/// A copy of a state, which training may change meanwhile.
#[derive(Clone, Debug)]
pub struct StagedState(StateDict);

/// A save that is under way.
///
/// Dropping it lets the save go on unobserved: its error is logged, and returned by the next
/// [`BackgroundSaver::start`].
#[derive(Debug)]
pub struct PendingSave {
    slot: Arc<Slot>,
    /// Ends when the outcome is there.
    ended: Option<watch::Receiver<()>>,
    shared: Arc<Shared>,
}

/// What a saver, its clones and its saves have in common.
#[derive(Debug, Default)]
struct Shared {
    worker: Mutex<Option<Worker>>,
    /// Ends with the save that was started last.
    last: Mutex<Option<watch::Receiver<()>>>,
    unread: Unread,
}

/// The error of a save whose [`PendingSave`] was dropped.
type Unread = Arc<Mutex<Option<CheckpointError>>>;

/// Opens what a save writes to.
type Opening =
    Pin<Box<dyn Future<Output = Result<Arc<dyn StorageWriter>, CheckpointError>> + Send>>;

/// What a save saves, and where to; or an error in place of it.
type Job = Result<(StagedState, Opening), CheckpointError>;

/// The thread on which saves run.
#[derive(Debug)]
struct Worker {
    runtime: Handle,
    /// Lets the thread end, with the save that has to be waited for.
    stop: oneshot::Sender<Option<watch::Receiver<()>>>,
    thread: thread::JoinHandle<()>,
}

/// Where a save leaves its outcome.
#[derive(Debug, Default)]
struct Slot {
    state: Mutex<SlotState>,
}

#[derive(Debug, Default)]
struct SlotState {
    finished: bool,
    outcome: Option<Result<SaveSummary, CheckpointError>>,
    /// The outcome was returned.
    returned: bool,
    aborted: bool,
    /// The handle was dropped.
    dropped: bool,
    /// While the save runs.
    abort: Option<AbortHandle>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BackgroundSaver {
    /// Saves as `saver` does.
    #[must_use]
    pub fn new(saver: Saver) -> Self {
        Self { saver, shared: Arc::default() }
    }

    /// Copies `state` and starts to save the copy.
    ///
    /// # Errors
    ///
    /// When the state cannot be copied because some of its memory is lent for writing, or an
    /// earlier save failed and its [`PendingSave`] was dropped; then this save is not started, on any
    /// rank, and the one after it can be. What fails later is reported by [`PendingSave::wait`].
    pub fn start(
        &self,
        state: &StateDict,
        writer: Arc<dyn StorageWriter>,
    ) -> Result<PendingSave, CheckpointError> {
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
    ) -> Result<PendingSave, CheckpointError>
    where
        F: Future<Output = Result<Arc<dyn StorageWriter>, CheckpointError>> + Send + 'static,
    {
        match self.earlier_failure().map_or_else(|| StagedState::of(state), Err) {
            Ok(staged) => Ok(self.run(Ok((staged, Box::pin(open))))),
            Err(error) => {
                // In place of a save, so that the other ranks do not wait for it.
                let failures = vec![RankFailure::of(self.saver.rank(), &error)];
                self.run(Err(CheckpointError::Ranks { phase: Phase::Plan, failures })).silence();
                Err(error)
            }
        }
    }

    /// Starts to save a copy that was made before, as after all ranks have agreed that theirs were.
    /// Where [`start`](Self::start) returns the error of an earlier save, this save fails with it.
    #[must_use = "an error is only noticed by waiting"]
    pub fn start_staged(&self, staged: StagedState, writer: Arc<dyn StorageWriter>) -> PendingSave {
        let open: Opening = Box::pin(async { Ok(writer) });
        self.run(self.earlier_failure().map_or(Ok((staged, open)), Err))
    }

    /// Takes part in a save with an error in place of a state, as [`Saver::fail`] does.
    #[must_use = "an error is only noticed by waiting"]
    pub fn fail(&self, error: CheckpointError) -> PendingSave {
        self.run(Err(error))
    }

    /// Waits until the saves that were started so far are over, well or not. Another operation in
    /// the same group begins after that.
    pub async fn settled(&self) {
        let last = lock(&self.shared.last).clone();
        if let Some(last) = last {
            over(last).await;
        }
    }

    /// The error of an earlier save whose [`PendingSave`] was dropped; once. The next save, of
    /// whatever kind, fails with it.
    #[must_use]
    pub fn earlier_failure(&self) -> Option<CheckpointError> {
        let earlier = lock(&self.shared.unread).take()?;
        let problem = "an earlier background save failed, so this save was not started";
        Some(CheckpointError::Background {
            problem: problem.into(),
            source: Some(Box::new(earlier)),
        })
    }

    fn run(&self, job: Job) -> PendingSave {
        let shared = Arc::clone(&self.shared);
        let slot = Arc::new(Slot::default());
        let runtime = match shared.runtime() {
            Ok(runtime) => runtime,
            Err(error) => {
                let problem = format!("there is no thread for it: {error}");
                slot.finish(Err(background(problem)), &shared.unread);
                return PendingSave { slot, ended: None, shared };
            }
        };
        // The turn is taken here and not in the task, because tasks may run in any order.
        let (done, turn) = watch::channel(());
        let before = lock(&shared.last).replace(turn.clone());
        // Not `shared`, whose last owner waits for this.
        let (saver, unread) = (self.saver.clone(), Arc::clone(&shared.unread));
        let of_task = Arc::clone(&slot);
        runtime.spawn(async move {
            if let Some(before) = before {
                over(before).await;
            }
            let result = match of_task.begin(&saver, job) {
                None => {
                    saver.leave("a save was canceled before it started");
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
            of_task.finish(result, &unread);
            drop(done);
        });
        PendingSave { slot, ended: Some(turn), shared }
    }
}

impl Shared {
    /// Where saves run; the thread is started for the first one.
    fn runtime(&self) -> io::Result<Handle> {
        let mut worker = lock(&self.worker);
        if let Some(worker) = &*worker {
            return Ok(worker.runtime.clone());
        }
        let (stop, stopped) = oneshot::channel::<Option<watch::Receiver<()>>>();
        let (built, runtime) = mpsc::channel();
        let thread = thread::Builder::new().name("dcp-save".into()).spawn(move || {
            // Here, because a runtime must not be dropped within another one.
            let runtime = match runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(built.send(Err(error))),
            };
            let _ = built.send(Ok(runtime.handle().clone()));
            runtime.block_on(async {
                if let Ok(Some(last)) = stopped.await {
                    over(last).await;
                }
            });
        })?;
        let gone = |_| io::Error::other("the thread of the saves ended at once");
        let runtime = runtime.recv().map_err(gone)??;
        *worker = Some(Worker { runtime: runtime.clone(), stop, thread });
        Ok(runtime)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(Worker { stop, thread, .. }) = lock(&self.worker).take() else { return };
        // Each save waits for the one before it, so the last one ends last.
        let _ = stop.send(lock(&self.last).take());
        let by_itself = thread.thread().id() == thread::current().id();
        if !by_itself && !thread::panicking() {
            // It only ends with a panic when a runtime does.
            let _ = thread.join();
        }
    }
}

impl Slot {
    /// Begins the save, unless it was aborted.
    fn begin(
        &self,
        saver: &Saver,
        job: Job,
    ) -> Option<JoinHandle<Result<SaveSummary, CheckpointError>>> {
        let mut state = lock(&self.state);
        if state.aborted {
            return None;
        }
        let saver = saver.clone();
        let save = tokio::spawn(async move {
            match job {
                Ok((StagedState(state), open)) => match open.await {
                    Ok(writer) => saver.save(&state, &*writer).await,
                    Err(error) => Err(saver.fail(error).await),
                },
                Err(error) => Err(saver.fail(error).await),
            }
        });
        state.abort = Some(save.abort_handle());
        Some(save)
    }

    /// Stores the outcome for the handle, or without one for the next save.
    fn finish(&self, result: Result<SaveSummary, CheckpointError>, unread: &Unread) {
        let mut state = lock(&self.state);
        state.abort = None;
        state.finished = true;
        state.outcome = Some(result);
        if state.dropped {
            state.pass_on(unread);
        }
    }
}

impl SlotState {
    /// Stores a failure that no handle can return for the next save.
    fn pass_on(&mut self, unread: &Unread) {
        if let Some(Err(error)) = self.outcome.take()
            && !self.aborted
            && !self.returned
        {
            *lock(unread) = Some(error);
        }
    }
}

impl StagedState {
    /// Copies a state: all elements of all tensors, so as much memory again.
    ///
    /// # Errors
    ///
    /// When some of the memory is lent for writing, or there is not enough for the copy.
    pub fn of(state: &StateDict) -> Result<Self, CheckpointError> {
        Ok(Self(copy_dict(state, "")?))
    }
}

impl PendingSave {
    /// Waits for the end and returns the outcome. It needs no runtime of tokio's.
    ///
    /// # Errors
    ///
    /// As [`Saver::save`], [`CheckpointError::Canceled`] after [`abort`](Self::abort), and
    /// [`CheckpointError::Background`] when the save panicked.
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
    pub fn abort(&self) {
        let mut state = lock(&self.slot.state);
        state.aborted = true;
        if let Some(save) = state.abort.take() {
            save.abort();
        }
    }

    /// Whether it has ended, well or not.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        lock(&self.slot.state).finished
    }

    /// Discards the outcome.
    fn silence(self) {
        lock(&self.slot.state).returned = true;
    }
}

impl Drop for PendingSave {
    fn drop(&mut self) {
        let mut state = lock(&self.slot.state);
        state.dropped = true;
        state.pass_on(&self.shared.unread);
    }
}

fn background(problem: String) -> CheckpointError {
    CheckpointError::Background { problem, source: None }
}

/// Waits for the end of a save.
async fn over(mut save: watch::Receiver<()>) {
    // Nothing is ever sent; the wait ends when the sender is dropped.
    while save.changed().await.is_ok() {}
}

fn copy_dict(dict: &Dict, path: &str) -> Result<Dict, CheckpointError> {
    dict.iter()
        .map(|(key, value)| {
            let name = key.as_str().unwrap_or("?");
            Ok((key.clone(), copy(value, &format!("{path}.{name}"))?))
        })
        .collect()
}

fn copy(value: &Value, path: &str) -> Result<Value, CheckpointError> {
    let copy_all = |items: &[Value]| -> Result<Vec<Value>, CheckpointError> {
        items.iter().map(|item| copy(item, path)).collect()
    };
    Ok(match value {
        Value::Tensor(tensor) => Value::Tensor(copy_tensor(tensor, path)?),
        Value::Dict(dict) => Value::Dict(copy_dict(dict, path)?),
        Value::List(items) => Value::List(copy_all(items)?),
        Value::Tuple(items) => Value::Tuple(copy_all(items)?),
        Value::Set(items) => Value::Set(copy_all(items)?),
        Value::FrozenSet(items) => Value::FrozenSet(copy_all(items)?),
        Value::Object(object) => Value::Object(Box::new(copy_object(object, path)?)),
        // All else is immutable.
        other => other.clone(),
    })
}

fn copy_object(object: &Object, path: &str) -> Result<Object, CheckpointError> {
    let mut copied = object.clone();
    for part in copied.args.iter_mut().chain(&mut copied.state).chain(&mut copied.items) {
        *part = copy(part, path)?;
    }
    for (key, value) in &mut copied.entries {
        (*key, *value) = (copy(key, path)?, copy(value, path)?);
    }
    Ok(copied)
}

fn copy_tensor(tensor: &Tensor, path: &str) -> Result<Tensor, CheckpointError> {
    let fqn = || path.trim_start_matches('.').to_owned();
    let shards = tensor
        .shards()
        .iter()
        .map(|shard| {
            let payload = shard
                .view()
                .payload()
                .map_err(|source| CheckpointError::Memory { fqn: fqn(), source })?;
            let len = usize::try_from(payload.len()).unwrap_or(usize::MAX);
            let mut bytes = Vec::new();
            if bytes.try_reserve_exact(len).is_err() {
                let what = format!("a copy of {:?}", fqn());
                return Err(PlanError::OutOfMemory { what, byte_len: payload.len() }.into());
            }
            payload.pieces().iter().for_each(|piece| bytes.extend_from_slice(piece));
            let memory = HostMemory::from_vec(bytes);
            Ok((shard.region().clone(), memory))
        })
        .collect::<Result<Vec<_>, CheckpointError>>()?;
    let dtype = tensor.dtype();
    if !tensor.is_sharded()
        && let [(_, memory)] = &*shards
    {
        return Ok(Tensor::replicated(dtype, tensor.shape().clone(), memory.clone())?);
    }
    let shards = shards
        .into_iter()
        .map(|(region, memory)| Shard::new(dtype, region, memory))
        .collect::<Result<Vec<_>, PlanError>>()?;
    Ok(Tensor::sharded(dtype, tensor.shape().clone(), shards)?)
}
