//! A trainer's checkpoints of one run: when to save, what to keep, where to resume.

mod operation;
mod preemption;
mod step_save;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use dcp_core::error::{FailureKind, Phase, error_chain};
use dcp_core::text::without_secrets;
use dcp_core::{CheckpointError, Stateful};
#[cfg(doc)]
use dcp_engine::Settings;
use dcp_engine::{LoadSummary, SaveSummary};
use dcp_jobs::Error;
use dcp_jobs::run::{
    AnyOf, KeepSteps, LatestValid, PruneReport, Retention, Run, SaveSchedule, SkippedStep,
    StepNaming,
};

use crate::Checkpointer;

pub use operation::ManagerOperation;
pub use preemption::Preemption;
use step_save::StepPlace;
pub use step_save::{PendingStep, StepSave};

type Clock = dyn Fn() -> SystemTime + Send + Sync;

/// The checkpoints of a training run: saves into the folder of a run, resumes from its newest valid
/// checkpoint, and deletes what a retention policy does not keep.
///
/// Every rank makes one with the same settings and keeps it for the whole run. The coordinator looks
/// at the run, decides and deletes; the others receive its decisions through the group.
///
/// ```
/// use dcp::jobs::run::{AnyOf, KeepBest, KeepLast, SaveSchedule};
/// use dcp::manager::{CheckpointManager, Preemption, SaveReason};
/// use dcp::{DType, StateDict, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let url = folder.path().join("run").display().to_string();
/// let manager = CheckpointManager::new(url)
///     .schedule(SaveSchedule::new().every_steps(10))
///     .keep(AnyOf::new().or(KeepLast(2)).or(KeepBest::lowest(1, "loss")))
///     .preemption(Preemption::on_sigterm()?);
///
/// let mut state = StateDict::new();
/// state.insert("weight", Tensor::zeros(DType::Float32, [4, 8])?);
/// let resumed = manager.resume(&mut state).blocking()?;
/// let first = resumed.map_or(1, |resumed| resumed.step + 1);
/// for step in first..=50 {
///     let loss = 1.0 / step as f64; // a step of training
///     if let Some(reason) = manager.should_save(step).blocking()? {
///         manager.save(step, &state).metric("loss", loss).blocking()?;
///         if reason == SaveReason::Preemption {
///             break;
///         }
///     }
/// }
/// let steps = dcp::block_on(manager.run().steps())??;
/// assert_eq!(steps.iter().map(|one| one.step).collect::<Vec<_>>(), [40, 50]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CheckpointManager {
    url: String,
    checkpointer: Checkpointer,
    naming: StepNaming,
    schedule: SaveSchedule,
    retention: Option<Arc<dyn Retention>>,
    verify: Option<bool>,
    deep_resume: bool,
    preemption: Option<Preemption>,
    check_every: u64,
    clock: Arc<Clock>,
    shared: Arc<Shared>,
}

/// The state that clones share.
#[derive(Debug, Default)]
struct Shared {
    /// The time of the last requested save, or of the first question.
    last: Mutex<Option<SystemTime>>,
    /// The step of the checkpoint that was loaded or committed last.
    parent: Mutex<Option<u64>>,
    /// The preemption was answered with a save.
    answered: AtomicBool,
}

/// The reason that a save is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SaveReason {
    /// The step is one of the schedule.
    Step,
    /// The time of the schedule has passed.
    Time,
    /// A rank got a signal to save now: the trainer saves and stops.
    Preemption,
}

/// A checkpoint that was loaded, from [`CheckpointManager::resume`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Resumed {
    /// The training step after which it was saved.
    pub step: u64,
    /// Newer checkpoints, which are incomplete or damaged.
    pub skipped: Vec<SkippedStep>,
    /// The summary of the load.
    pub load: LoadSummary,
}

/// A checkpoint that was saved, from [`CheckpointManager::save`].
#[derive(Debug)]
#[non_exhaustive]
pub struct SavedStep {
    /// The training step.
    pub step: u64,
    /// The summary of the save.
    pub save: SaveSummary,
    /// The deletions of the retention policy; on the coordinator alone, and only with a policy.
    pub pruned: Option<PruneReport>,
    /// The failure after the commit, on the coordinator: of the metrics, the tracker file, or the
    /// retention. The checkpoint itself is whole. The retention of the next save catches up.
    pub problem: Option<Error>,
}

impl CheckpointManager {
    /// The run in the folder at `url`, which the first save makes. It saves in this process alone
    /// until a [`checkpointer`](Self::checkpointer) says otherwise, has no schedule, and deletes
    /// nothing.
    #[must_use]
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            checkpointer: Checkpointer::new(),
            naming: StepNaming::default(),
            schedule: SaveSchedule::default(),
            retention: None,
            verify: None,
            deep_resume: false,
            preemption: None,
            check_every: 1,
            clock: Arc::new(SystemTime::now),
            shared: Arc::default(),
        }
    }

    /// Saves and loads by this, with its group of ranks, storages, planners and casts.
    ///
    /// With [`LoadMode::AllowMissing`](crate::LoadMode::AllowMissing) as its [`Settings::load_mode`],
    /// [`resume`](Self::resume) loads into a trainer that got a new key, or more ranks that each have a key of
    /// their own: what the checkpoint lacks keeps its value, and is named in [`Resumed::load`].
    #[must_use]
    pub fn checkpointer(self, checkpointer: Checkpointer) -> Self {
        Self { checkpointer, ..self }
    }

    /// Names folders in this way; [`StepNaming::Dash`] by default. Checkpoints of every naming are
    /// resumed from. With [`StepNaming::Iteration`], the tracker file of Megatron-LM is written, too.
    #[must_use]
    pub fn naming(self, naming: StepNaming) -> Self {
        Self { naming, ..self }
    }

    /// Sets when [`should_save`](Self::should_save) requests a save.
    #[must_use]
    pub fn schedule(self, schedule: SaveSchedule) -> Self {
        Self { schedule, ..self }
    }

    /// Deletes, after each save, the checkpoints that this policy does not keep. See
    /// [`Prune`](dcp_jobs::run::Prune) for what stays whatever the policy. The checkpoint that was just saved is not
    /// read again: see [`verify_before_deletion`](Self::verify_before_deletion).
    #[must_use]
    pub fn keep(self, policy: impl Retention + 'static) -> Self {
        Self { retention: Some(Arc::new(policy)), ..self }
    }

    /// Deletes only when a checkpoint of the run verifies, and keeps the newest one that does, by its index and the
    /// lengths of its files, or with `deep` by every byte.
    #[must_use]
    pub fn verify_before_deletion(self, deep: bool) -> Self {
        Self { verify: Some(deep), ..self }
    }

    /// Whether [`resume`](Self::resume) compares every byte of a checkpoint with its checksum
    /// before it takes it; by default it compares the index with the lengths of files.
    #[must_use]
    pub fn deep_resume(self, deep: bool) -> Self {
        Self { deep_resume: deep, ..self }
    }

    /// Saves when a rank is preempted.
    #[must_use]
    pub fn preemption(self, preemption: Preemption) -> Self {
        Self { preemption: Some(preemption), ..self }
    }

    /// Sets how often ranks agree about time and preemption: at multiples of so many steps; 1 by default.
    /// In between, [`should_save`](Self::should_save) exchanges nothing and decides by the step.
    #[must_use]
    pub fn check_every(self, steps: u64) -> Self {
        Self { check_every: steps.max(1), ..self }
    }

    /// The time, for schedules and policies; the system's by default.
    #[must_use]
    pub fn clock(self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self { clock: Arc::new(clock), ..self }
    }

    /// The run, to look at its checkpoints, to pin them, and to delete some.
    #[must_use]
    pub fn run(&self) -> Run {
        crate::opener(self.checkpointer.storage_registry()).run(&self.url)
    }

    /// Whether the trainer saves after `step`, and why. Every rank calls it after the same steps and
    /// receives the same answer.
    ///
    /// A schedule of steps needs no exchange. For times and preemptions, ranks exchange a message: in
    /// the [`decision_group`](Settings::decision_group) where there is one, and otherwise in the
    /// group of the saves, after background saves under way. The time is the coordinator's.
    /// A preemption is answered once.
    ///
    /// # Errors
    ///
    /// When a rank of the group is lost.
    pub fn should_save(&self, step: u64) -> ManagerOperation<'_, Option<SaveReason>> {
        ManagerOperation::new(self.decide(step))
    }

    async fn decide(&self, step: u64) -> Result<Option<SaveReason>, CheckpointError> {
        let due = self.schedule.is_due_at(step).then_some(SaveReason::Step);
        let exchanges = self.schedule.has_time() || self.preemption.is_some();
        if !exchanges || !step.is_multiple_of(self.check_every) {
            return Ok(due);
        }
        let now = (self.clock)();
        let last = *self.last().get_or_insert(now);
        let is_late = self.schedule.is_due_by_time(last, now);
        let is_preempted = self.preemption.as_ref().is_some_and(Preemption::is_requested);
        let group = self.checkpointer.decisive_group().await?;
        let coordinator = group.context().coordinator;
        let coordinator_at = usize::try_from(coordinator).unwrap_or(usize::MAX);
        let mine = Ok((is_late, is_preempted));
        let all =
            group.run(async |group| group.all_gather_results(Phase::Plan, mine).await).await?;
        let preempted = all.iter().any(|(_, preempted)| *preempted);
        if preempted && !self.shared.answered.swap(true, Ordering::SeqCst) {
            return Ok(Some(SaveReason::Preemption));
        }
        let late = all.get(coordinator_at).or(all.first()).is_some_and(|(late, _)| *late);
        Ok(due.or(late.then_some(SaveReason::Time)))
    }

    fn last(&self) -> std::sync::MutexGuard<'_, Option<SystemTime>> {
        self.shared.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn parent(&self) -> std::sync::MutexGuard<'_, Option<u64>> {
        self.shared.parent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads the newest valid checkpoint of the run into `state`; `None` where the run has none and
    /// training starts from the beginning. Every rank calls it. The coordinator chooses: newer checkpoints that are
    /// incomplete or damaged are skipped, and named in [`Resumed::skipped`]. Damage that is found while a
    /// checkpoint is loaded leads to the next older one, which overwrites what the state got of it.
    ///
    /// # Errors
    ///
    /// On every rank, when the run has checkpoints and none is valid, the run cannot be listed, or
    /// the checkpoint does not fit the state.
    pub fn resume<'a, S: Stateful + Send + ?Sized>(
        &'a self,
        state: &'a mut S,
    ) -> ManagerOperation<'a, Option<Resumed>> {
        ManagerOperation::new(async move {
            let mut damaged = Vec::new();
            loop {
                let Some((step, url, skipped)) = self.choose(damaged.last()).await? else {
                    return Ok(None);
                };
                damaged.extend(skipped);
                match self.checkpointer.load(&mut *state, &url).await {
                    Ok(load) => {
                        *self.parent() = Some(step);
                        return Ok(Some(Resumed { step, skipped: damaged, load }));
                    }
                    // All ranks have the same report.
                    Err(error) if is_damage(error.kind()) => {
                        let name = url.rsplit('/').next().unwrap_or_default();
                        damaged.push(SkippedStep::new(name, step, error_chain(&error)));
                    }
                    Err(error) => return Err(error),
                }
            }
        })
    }

    /// The checkpoint that all ranks resume from: its step, its URL, and what was skipped.
    async fn choose(
        &self,
        damaged: Option<&SkippedStep>,
    ) -> Result<Option<(u64, String, Vec<SkippedStep>)>, CheckpointError> {
        type Chosen = (Option<(u64, String)>, Vec<(String, u64, String)>);
        let group = self.checkpointer.settled_group().await?;
        let (step, skipped) = group
            .run(async |group| {
                let decision = match group.context().is_coordinator() {
                    false => None,
                    true => Some(self.latest_valid(damaged).await.map(|valid| {
                        let LatestValid { step, skipped, .. } = valid;
                        let step =
                            step.map(|step| (step.step, step.checkpoint.unwrap_or(step.name)));
                        let skipped =
                            skipped.into_iter().map(|one| (one.name, one.step, one.problem));
                        let chosen: Chosen = (step, skipped.collect());
                        (chosen, ())
                    })),
                };
                Ok(group.broadcast_result::<Chosen, ()>(Phase::Open, decision).await?.0)
            })
            .await?;
        let skipped =
            skipped.into_iter().map(|(name, step, problem)| SkippedStep::new(name, step, problem));
        Ok(step.map(|(step, place)| {
            let url = format!("{}/{place}", self.url.trim_end_matches('/'));
            (step, url, skipped.collect())
        }))
    }

    async fn latest_valid(
        &self,
        damaged: Option<&SkippedStep>,
    ) -> Result<LatestValid, CheckpointError> {
        let (run, deep) = (self.run(), self.deep_resume);
        let valid = match damaged {
            Some(newer) => run.latest_valid_before(newer.step, deep).await,
            None => run.latest_valid(deep).await,
        };
        let valid = match valid {
            // The first save makes the folder.
            Err(error) if error.kind() == dcp_jobs::ErrorKind::NotFound => {
                return Ok(LatestValid::default());
            }
            valid => valid.map_err(plugin)?,
        };
        match (&valid.step, valid.skipped.first().or(damaged)) {
            // A new start would overwrite checkpoints that can be saved by hand.
            (None, Some(first)) => {
                let message = format!(
                    "no checkpoint of the run {:?} is valid; {}: {}",
                    without_secrets(&self.url),
                    first.name,
                    first.problem
                );
                Err(CheckpointError::NotACheckpoint { message })
            }
            _ => Ok(valid),
        }
    }

    /// A save of `state` after `step`, into the folder of the step. Every rank calls it.
    pub fn save<S: Stateful + ?Sized>(&self, step: u64, state: &S) -> StepSave {
        *self.last() = Some((self.clock)());
        let url = self.run().step_url(self.naming, step);
        let save = self.checkpointer.noting_steps(step, *self.parent()).save(state, &url);
        StepSave::new(self.clone(), StepPlace { step, url }, save)
    }

    /// Does the work after a commit, on the coordinator: metrics, tracker, retention.
    async fn committed(
        self,
        step: u64,
        save: SaveSummary,
        metrics: BTreeMap<String, f64>,
    ) -> SavedStep {
        *self.parent() = Some(step);
        let mut saved = SavedStep { step, save, pruned: None, problem: None };
        if !self.checkpointer.settings().is_coordinator() {
            return saved;
        }
        let run = self.run();
        let after = async {
            run.note_save(self.naming, step, &metrics).await?;
            let Some(policy) = &self.retention else { return Ok(None) };
            // Whoever goes back to an earlier step saves what is newest, and has not the highest number.
            let kept = AnyOf::new().or(Arc::clone(policy)).or(KeepSteps([step].into()));
            let mut prune = run.prune().policy(kept);
            prune = prune.now((self.clock)());
            // The newest one is what this group has just committed, with files of the lengths in its plan: to read its
            // index again at every save would find nothing new.
            prune = prune.verify(self.verify.is_some()).deep(self.verify == Some(true));
            prune.run().await.map(Some)
        };
        match after.await {
            Ok(pruned) => saved.pruned = pruned,
            Err(error) => saved.problem = Some(error),
        }
        saved
    }
}

impl fmt::Debug for CheckpointManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckpointManager")
            .field("url", &without_secrets(&self.url))
            .field("naming", &self.naming)
            .field("schedule", &self.schedule)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

/// Whether a load failed because of what is stored, so that an older checkpoint may load.
fn is_damage(kind: FailureKind) -> bool {
    use dcp_core::StorageErrorKind::{Changed, NotFound, Truncated};
    matches!(
        kind,
        FailureKind::Damaged
            | FailureKind::NotACheckpoint
            | FailureKind::Storage(NotFound | Truncated | Changed)
    )
}

fn plugin(error: Error) -> CheckpointError {
    CheckpointError::Plugin(Box::new(error))
}
