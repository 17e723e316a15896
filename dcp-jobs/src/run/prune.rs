//! Deleting checkpoints of a run by a retention policy.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_core::error::error_chain;
use dcp_core::registry::Access;
use dcp_core::storage::{Leftover, LeftoverAction, LeftoverKind};
use dcp_core::{Storage, StorageErrorKind};
use serde::Serialize;

use crate::error::{Error, ErrorKind, Reasons};

use super::delete::{Deletion, Doomed, Gone, Outcome};
use super::look::{Look, Seen};
use super::order::StepOrder;
use super::protect::{compare_with_older, examine, keep_best, keep_needed, refuse};
use super::retention::{Decision, Retention, decide_by, duration_text};
use super::{Run, RunStep, SkippedStep};

impl Run {
    /// A deletion of checkpoints that a policy does not keep, or of what killed saves left. Without
    /// a policy and without [`incomplete`](Prune::incomplete), it only finishes deletions that did
    /// not end.
    pub fn prune(&self) -> Prune {
        Prune {
            run: self.clone(),
            policy: None,
            incomplete: None,
            verify: true,
            deep: false,
            by: None,
            now: None,
        }
    }
}

/// A deletion to [`run`](Self::run), from [`Run::prune`].
///
/// The newest complete checkpoint, pinned ones, those that a file or link of the run names and those that
/// a kept one needs stay, whatever the policy; so do files, and folders that are not named after a step.
/// So does the newest one that [verifies](crate::Checkpoint::verify): what counts as complete by its names, lengths
/// and headers may be damaged where only a reader notices it.
/// Where the newest note of a trainer about its best checkpoint cannot be read, all complete ones stay.
/// Before anything is deleted, every complete checkpoint is looked at by itself, and counts as incomplete
/// where its format finds a problem. A deletion removes the files
/// that make a checkpoint visible first, in the opposite order of a save, then all others in its folder. Links
/// that lead out of the run are not followed. A checkpoint that a saver holds stays.
#[derive(Clone, Debug)]
#[must_use = "nothing is deleted before `run`"]
pub struct Prune {
    run: Run,
    policy: Option<Arc<dyn Retention>>,
    incomplete: Option<Duration>,
    verify: bool,
    deep: bool,
    by: Option<StepOrder>,
    now: Option<SystemTime>,
}

/// The deletions of a [`Prune`], and the checkpoints that it keeps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PrunePlan {
    /// Every checkpoint of the run, in ascending order of steps, with its decision.
    pub steps: Vec<Planned>,
    /// The checkpoints that are newer than the newest valid one, where that was looked for.
    pub skipped: Vec<SkippedStep>,
    /// Temporary files and open uploads of dead writers, which are removed.
    pub leftovers: Vec<LeftBehind>,
    /// The checkpoints that would be deleted if nothing were against it.
    pub not_deleted: Vec<NotDeleted>,
    /// Names of files and folders of the run that are no checkpoints of steps, and stay.
    pub others: Vec<String>,
    /// The reasons that no complete checkpoint is deleted that the policy does not keep: files of a trainer
    /// that may name it as the best, each as a clause with what is wrong with the file.
    pub unclear_notes: Vec<String>,
}

/// A temporary file or an open upload of a dead writer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[non_exhaustive]
pub struct LeftBehind {
    /// The path of the file, or that of the object which the upload would have become, in the folder
    /// of the run.
    pub path: String,
    /// The kind of the leftover.
    pub kind: LeftBehindKind,
    /// Its length, if the storage says it. Stores do not say it of open uploads.
    pub bytes: Option<u64>,
    /// The time of its last write, or at which the upload began, in seconds since 1970.
    pub modified: Option<u64>,
}

/// The kinds of a [`LeftBehind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LeftBehindKind {
    /// A temporary file or object.
    TemporaryFile,
    /// An upload that the storage holds open.
    OpenUpload,
}

impl From<Leftover> for LeftBehind {
    fn from(found: Leftover) -> Self {
        let since = |time: SystemTime| Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs());
        let kind = match found.kind {
            LeftoverKind::OpenUpload => LeftBehindKind::OpenUpload,
            _ => LeftBehindKind::TemporaryFile,
        };
        let modified = found.modified.and_then(since);
        Self { path: found.path, kind, bytes: found.byte_len, modified }
    }
}

/// A checkpoint and its decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Planned {
    /// The checkpoint.
    #[serde(flatten)]
    pub step: RunStep,
    /// Whether it is kept, and why.
    #[serde(flatten)]
    pub decision: Decision,
}

impl PrunePlan {
    /// The checkpoints that are deleted.
    pub fn deleted(&self) -> impl Iterator<Item = &RunStep> {
        self.steps.iter().filter(|one| one.decision.delete).map(|one| &one.step)
    }
}

/// The result of a [`Prune`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PruneReport {
    /// The checkpoints that are gone.
    pub deleted: Vec<Deleted>,
    /// The checkpoints that were to be deleted and are still there, whole or in part.
    pub not_deleted: Vec<NotDeleted>,
    /// Files that are gone.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Temporary files and open uploads of dead writers that are gone.
    pub leftovers: Vec<LeftBehind>,
    /// Names of files and folders of the run that are no checkpoints of steps, and stay.
    pub others: Vec<String>,
}

/// A checkpoint that is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Deleted {
    /// The name of its folder.
    pub name: String,
    /// The training step.
    pub step: u64,
    /// Its files.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The reason that its folder is still there, without these files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folder_stays: Option<String>,
}

/// A checkpoint that was to be deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NotDeleted {
    /// The name of its folder.
    pub name: String,
    /// The training step.
    pub step: u64,
    /// The reason that it is still there.
    pub reason: String,
    /// Whether the storage failed, so that the checkpoint may be half deleted. Another run of the
    /// same deletion finishes it.
    pub failed: bool,
}

impl Prune {
    /// Deletes the checkpoints that this policy does not keep.
    pub fn policy(mut self, policy: impl Retention + 'static) -> Self {
        self.policy = Some(Arc::new(policy));
        self
    }

    /// Deletes what killed saves left: incomplete checkpoints whose last file was written at least
    /// `min_age` ago, and temporary files and open uploads that are as old and whose writer is not
    /// known to run. In a run without a complete checkpoint, incomplete ones stay.
    pub fn incomplete(mut self, min_age: Duration) -> Self {
        self.incomplete = Some(min_age);
        self
    }

    /// Whether a complete checkpoint is deleted only when one of the run [verifies](crate::Checkpoint::verify), of
    /// which the newest stays; by default that is so.
    ///
    /// Checkpoints are verified from the newest to the first that is whole, so that in a sound run the index and the
    /// small objects of one are read. Damaged files that its format neither names nor owns do not count against a
    /// checkpoint. Where nothing complete would be deleted, nothing is verified.
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// Whether every byte of these checkpoints is read and compared with its checksum.
    pub fn deep(mut self, deep: bool) -> Self {
        self.deep = deep;
        self
    }

    /// Which checkpoint is newer than another one: the one of the higher step, or the one that was written
    /// later. Without a choice, nothing complete is deleted from a run where the two disagree.
    pub fn by(mut self, order: StepOrder) -> Self {
        self.by = Some(order);
        self
    }

    /// The time against which ages are compared; by default that of the call.
    pub fn now(mut self, now: SystemTime) -> Self {
        self.now = Some(now);
        self
    }

    fn time(&self) -> SystemTime {
        self.now.unwrap_or_else(SystemTime::now)
    }

    /// Decides, and deletes nothing.
    ///
    /// # Errors
    ///
    /// [`Undecided`](ErrorKind::Undecided) where steps and times disagree and [`by`](Self::by) has not
    /// chosen; [`InvalidOption`](ErrorKind::InvalidOption) where no checkpoint has a metric of the policy;
    /// [`Damaged`](ErrorKind::Damaged) where no checkpoint is complete, or none verifies. When the run
    /// cannot be listed, or a checkpoint cannot be looked at for a failure that may pass.
    pub async fn plan(&self) -> Result<PrunePlan, Error> {
        let storage = self.run.open(Access::Read).await?;
        let (mut plan, look) = self.decide(&storage).await?;
        if let Some(min_age) = self.incomplete {
            plan.leftovers = leftovers(&*storage, min_age, LeftoverAction::List).await?;
        }
        if !(self.verify || self.deep) || !plan.deleted().any(RunStep::is_complete) {
            return Ok(plan);
        }
        let mut steps: Vec<_> = plan.steps.iter().map(|one| one.step.clone()).collect();
        self.order().sort(&mut steps);
        let valid = self.run.valid_of(steps, self.deep).await?;
        let Some(newest) = valid.step else { return Err(nothing_valid(&valid.skipped)) };
        let mut deleted = plan.steps.iter_mut().filter(|one| one.decision.delete);
        if let Some(one) = deleted.find(|one| one.step.name == newest.name) {
            one.decision = Decision::keep("the newest valid one");
        }
        keep_needed(&look, &mut plan);
        plan.skipped = valid.skipped;
        Ok(plan)
    }

    fn order(&self) -> StepOrder {
        self.by.unwrap_or_default()
    }

    /// Refuses a checkpoint in the place of the directory of a run: nothing in it could be deleted.
    async fn refuse_checkpoint(&self, storage: &Arc<dyn Storage>) -> Result<(), Error> {
        let Run { opener, url } = &self.run;
        let place = opener.look(url, storage).await.map_err(|error| self.run.cannot_read(error))?;
        let found = opener.formats.classify(&place.listing().root()).map(|found| found.found);
        match found.filter(|found| found.is_checkpoint() || found.inner.is_some()) {
            None => Ok(()),
            Some(found) => {
                let message = format!("{url:?} is no directory of a run: it {found}");
                let hint = "pass the directory that has the steps of the run";
                Err(Error::new(ErrorKind::InvalidPlace, message).with_hint(hint))
            }
        }
    }

    /// Looks at the run, and decides.
    async fn decide(&self, storage: &Arc<dyn Storage>) -> Result<(PrunePlan, Look), Error> {
        let failed = |error| self.run.cannot_read(error);
        let formats = &self.run.opener.formats;
        let mut look = self.run.look(storage).await.map_err(failed)?;
        if look.steps.is_empty() {
            self.refuse_checkpoint(storage).await?;
        }
        let mut plan = self.decided(&look);
        if plan.deleted().next().is_some() {
            examine(storage, formats, &mut look.steps).await.map_err(failed)?;
            let mut ordered: Vec<_> = look.steps.iter_mut().collect();
            ordered.sort_by(|a, b| {
                let key = |one: &Seen| (one.step.step, one.step.modified, one.step.name.clone());
                self.order().compare(key(a), key(b))
            });
            compare_with_older(&mut ordered);
            plan = self.decided(&look);
        }
        refuse(&look, &plan, self.policy.as_deref(), self.by)?;
        for one in plan.steps.iter_mut().filter(|one| one.decision.delete) {
            let (name, step) = (one.step.name.clone(), one.step.step);
            let deletion = Deletion { storage, formats };
            let reason = match deletion.objection(&name, self.why(&one.step)).await {
                Ok(None) => continue,
                Ok(Some(reason)) => reason,
                Err(error) if error.is_retryable() => return Err(failed(error)),
                Err(error) => error_chain(&error),
            };
            one.decision = Decision::keep(reason.clone());
            plan.not_deleted.push(NotDeleted { name, step, reason, failed: false });
        }
        keep_needed(&look, &mut plan);
        Ok((plan, look))
    }

    fn decided(&self, look: &Look) -> PrunePlan {
        let steps = look.steps.iter().map(|one| &one.step);
        let facts: Vec<_> = steps.clone().map(RunStep::facts).collect();
        let now = self.time();
        let any_complete = steps.clone().any(RunStep::is_complete);
        let mut decisions = match &self.policy {
            Some(policy) => decide_by(self.order(), &facts, policy, now),
            None => facts.iter().map(|_| Decision::keep("no policy")).collect(),
        };
        for (step, decision) in steps.clone().zip(&mut decisions) {
            if step.pinned {
                *decision = Decision::keep("pinned");
            } else if step.complete == Some(false) {
                *decision = self.about_incomplete(step, any_complete, now);
            } else if step.complete.is_none() && !step.is_complete() {
                let unknown = "whether it is complete is unknown".to_owned();
                *decision = Decision::keep(match &step.problem {
                    Some(problem) => format!("{unknown}: {problem}"),
                    None => unknown,
                });
            }
        }
        let planned = steps.cloned().zip(decisions);
        let steps = planned.map(|(step, decision)| Planned { step, decision }).collect();
        let mut plan = PrunePlan { steps, others: look.others.clone(), ..PrunePlan::default() };
        keep_best(look, &mut plan, self.by);
        keep_needed(look, &mut plan);
        plan
    }

    fn about_incomplete(&self, step: &RunStep, any_complete: bool, now: SystemTime) -> Decision {
        if step.deleting {
            return Decision::delete("its deletion did not end");
        }
        let Some(min_age) = self.incomplete else { return Decision::keep("not complete") };
        let min = duration_text(min_age);
        let age = step.facts().saved.and_then(|saved| now.duration_since(saved).ok());
        match age {
            _ if step.tracked => Decision::keep("the tracker of the run names it"),
            _ if !step.named_by.is_empty() => Decision::keep(step.named_by.join(", ")),
            _ if !any_complete => Decision::keep("the run has no complete checkpoint"),
            Some(age) if age >= min_age => {
                Decision::delete(format!("incomplete, and not written to for {min}"))
            }
            _ => Decision::keep(format!("incomplete, but younger than {min}: a save may go on")),
        }
    }

    /// Decides, and deletes.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan). A checkpoint that cannot be deleted does not stop the others; it is in
    /// [`PruneReport::not_deleted`].
    pub async fn run(self) -> Result<PruneReport, Error> {
        let plan = self.plan().await?;
        self.delete(&plan).await
    }

    /// Deletes what a plan says, as far as that is still what is to be deleted: the run is looked at
    /// again, because it may have changed since.
    ///
    /// # Errors
    ///
    /// As [`plan`](Self::plan).
    pub async fn apply(self, plan: &PrunePlan) -> Result<PruneReport, Error> {
        let planned: BTreeSet<_> = plan.deleted().map(|step| &step.name).collect();
        let storage = self.run.open(Access::Read).await?;
        let (mut now, _) = self.decide(&storage).await?;
        now.leftovers.clone_from(&plan.leftovers);
        for one in &mut now.steps {
            one.decision.delete &= planned.contains(&one.step.name);
        }
        self.delete(&now).await
    }

    async fn delete(&self, plan: &PrunePlan) -> Result<PruneReport, Error> {
        let mut report = PruneReport {
            not_deleted: plan.not_deleted.clone(),
            others: plan.others.clone(),
            ..PruneReport::default()
        };
        if plan.deleted().next().is_none() && self.incomplete.is_none() {
            return Ok(report);
        }
        let storage = self.run.open(Access::Write).await?;
        // Before the folders that they are in.
        if let Some(min_age) = self.incomplete {
            let removed = leftovers(&*storage, min_age, LeftoverAction::Remove).await?;
            // Opening a folder to write removes some of what the plan has.
            let gone: BTreeSet<_> = removed.into_iter().chain(plan.leftovers.clone()).collect();
            report.leftovers = gone.into_iter().collect();
        }
        for step in plan.deleted() {
            self.delete_one(&storage, step, &mut report).await;
        }
        Ok(report)
    }

    /// Returns why a checkpoint is deleted.
    fn why(&self, step: &RunStep) -> Doomed {
        match (step.is_complete(), step.deleting) {
            (true, _) => Doomed::Complete,
            (false, true) => Doomed::Deleting,
            (false, false) => {
                let min_age = self.incomplete.unwrap_or(Duration::MAX);
                Doomed::Incomplete { min_age, now: self.time() }
            }
        }
    }

    async fn delete_one(
        &self,
        storage: &Arc<dyn Storage>,
        step: &RunStep,
        report: &mut PruneReport,
    ) {
        let formats = &self.run.opener.formats;
        let (name, why) = (step.name.clone(), self.why(step));
        let mut gone = Gone::default();
        let outcome = Deletion { storage, formats }.run(&name, why, &mut gone).await;
        let Gone { files, bytes } = gone;
        report.files = report.files.saturating_add(files);
        report.bytes = report.bytes.saturating_add(bytes);
        let (reason, failed) = match outcome {
            Ok(Outcome::Deleted { folder_stays }) => {
                let step = step.step;
                report.deleted.push(Deleted { name, step, files, bytes, folder_stays });
                return;
            }
            Ok(Outcome::Kept(reason)) => (reason, false),
            Err(error) => (error_chain(&error), true),
        };
        report.not_deleted.push(NotDeleted { name, step: step.step, reason, failed });
    }
}

/// No checkpoint of a run verifies.
fn nothing_valid(skipped: &[SkippedStep]) -> Error {
    let message = "no checkpoint of the run verifies, so nothing is deleted";
    let problems = skipped.iter().map(|one| format!("{}: {}", one.name, one.problem)).collect();
    let error = Error::new(ErrorKind::Damaged, message);
    match Reasons::new(problems) {
        Some(reasons) => error.because(reasons),
        None => error,
    }
}

/// The leftovers of a run, in order; none where the storage cannot list them.
async fn leftovers(
    storage: &dyn Storage,
    min_age: Duration,
    action: LeftoverAction,
) -> Result<Vec<LeftBehind>, Error> {
    match storage.leftovers(None, min_age, action).await {
        Ok(found) => {
            let mut found: Vec<_> = found.into_iter().map(LeftBehind::from).collect();
            found.sort_unstable();
            Ok(found)
        }
        Err(error) if error.kind() == StorageErrorKind::Unsupported => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}
