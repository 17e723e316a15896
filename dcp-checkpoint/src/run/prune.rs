//! Deleting checkpoints of a run by a retention policy.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_core::error::error_chain;
use dcp_core::registry::Access;
use dcp_core::storage::{Leftover, LeftoverAction, LeftoverKind};
use dcp_core::{Storage, StorageErrorKind};
use serde::Serialize;

use super::delete::{Deletion, Doomed, Outcome};
use super::retention::{Decision, Retention, decide, duration_text};
use super::{Run, RunStep, SkippedStep};
use crate::error::Error;

impl Run {
    /// A deletion of checkpoints that a policy does not keep, or of what killed saves left. Without
    /// a policy and without [`incomplete`](Prune::incomplete), it only finishes deletions that did
    /// not end.
    pub fn prune(&self) -> Prune {
        Prune { run: self.clone(), policy: None, incomplete: None, verify: None, now: None }
    }
}

/// A deletion to [`run`](Self::run), from [`Run::prune`].
///
/// The newest complete checkpoint, pinned ones and the one that a tracker file names stay, whatever
/// the policy; so do files, and folders that are not named after a step. A deletion removes the files
/// that make a checkpoint visible first, in the opposite order of a save, then all others in its folder. Links
/// that lead out of the run are not followed. A checkpoint that a saver holds stays.
#[derive(Clone, Debug)]
#[must_use = "nothing is deleted before `run`"]
pub struct Prune {
    run: Run,
    policy: Option<Arc<dyn Retention>>,
    incomplete: Option<Duration>,
    verify: Option<bool>,
    now: Option<SystemTime>,
}

/// What a [`Prune`] deletes, and what it keeps.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PrunePlan {
    /// Every checkpoint of the run, in ascending order of steps, with its decision.
    pub steps: Vec<Planned>,
    /// The checkpoints that are newer than the newest valid one, where that was requested.
    pub skipped: Vec<SkippedStep>,
    /// Temporary files and open uploads of dead writers, which are removed.
    pub leftovers: Vec<LeftBehind>,
}

/// A temporary file or an open upload of a dead writer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[non_exhaustive]
pub struct LeftBehind {
    /// The path of the file, or that of the object which the upload would have become, in the folder
    /// of the run.
    pub path: String,
    /// What it is.
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

/// What a [`Prune`] did.
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
}

/// A checkpoint that was to be deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NotDeleted {
    /// The name of its folder.
    pub name: String,
    /// The training step.
    pub step: u64,
    /// Why it is still there.
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

    /// Deletes only when a checkpoint of the run [verifies](crate::Checkpoint::verify), and keeps
    /// the newest one that does; with `deep`, by every byte.
    pub fn verify(mut self, deep: bool) -> Self {
        self.verify = Some(deep);
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
    /// When the run cannot be listed, or a checkpoint cannot be verified for a failure that may
    /// pass.
    pub async fn plan(&self) -> Result<PrunePlan, Error> {
        let mut plan = self.decided(self.run.steps().await?);
        if let Some(min_age) = self.incomplete {
            let storage = self.run.open(Access::Read).await?;
            plan.leftovers = leftovers(&*storage, min_age, LeftoverAction::List).await?;
        }
        let deep = match self.verify {
            Some(deep) if plan.deleted().any(RunStep::is_complete) => deep,
            _ => return Ok(plan),
        };
        let steps = plan.steps.iter().map(|one| one.step.clone()).collect();
        let valid = self.run.valid_of(steps, deep).await?;
        let newest = valid.step.map(|step| step.name);
        for one in plan.steps.iter_mut().filter(|one| one.step.is_complete()) {
            if newest.as_ref() == Some(&one.step.name) {
                one.decision = Decision::keep("the newest valid one");
            } else if newest.is_none() {
                one.decision = Decision::keep("no checkpoint of the run is valid");
            }
        }
        plan.skipped = valid.skipped;
        Ok(plan)
    }

    fn decided(&self, steps: Vec<RunStep>) -> PrunePlan {
        let facts: Vec<_> = steps.iter().map(RunStep::facts).collect();
        let now = self.time();
        let any_complete = steps.iter().any(RunStep::is_complete);
        let mut decisions = match &self.policy {
            Some(policy) => decide(&facts, policy, now),
            None => steps.iter().map(|_| Decision::keep("no policy")).collect(),
        };
        for (step, decision) in steps.iter().zip(&mut decisions) {
            if step.complete == Some(false) {
                *decision = self.about_incomplete(step, any_complete, now);
            } else if step.complete.is_none() {
                *decision = Decision::keep("whether it is complete is unknown");
            }
        }
        let planned = steps.into_iter().zip(decisions);
        let steps = planned.map(|(step, decision)| Planned { step, decision }).collect();
        PrunePlan { steps, ..PrunePlan::default() }
    }

    fn about_incomplete(&self, step: &RunStep, any_complete: bool, now: SystemTime) -> Decision {
        if step.pinned {
            return Decision::keep("pinned");
        }
        if step.deleting {
            return Decision::delete("its deletion did not end");
        }
        let Some(min_age) = self.incomplete else { return Decision::keep("not complete") };
        let min = duration_text(min_age);
        let age = step.facts().saved.and_then(|saved| now.duration_since(saved).ok());
        match age {
            _ if step.tracked => Decision::keep("the tracker of the run names it"),
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
    /// When the run cannot be listed.
    pub async fn apply(self, plan: &PrunePlan) -> Result<PruneReport, Error> {
        let planned: BTreeSet<_> = plan.deleted().map(|step| &step.name).collect();
        let mut now = self.decided(self.run.steps().await?);
        now.leftovers.clone_from(&plan.leftovers);
        for one in &mut now.steps {
            one.decision.delete &= planned.contains(&one.step.name);
        }
        self.delete(&now).await
    }

    async fn delete(&self, plan: &PrunePlan) -> Result<PruneReport, Error> {
        let mut report = PruneReport::default();
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

    async fn delete_one(
        &self,
        storage: &Arc<dyn Storage>,
        step: &RunStep,
        report: &mut PruneReport,
    ) {
        let why = match (step.is_complete(), step.deleting) {
            (true, _) => Doomed::Complete,
            (false, true) => Doomed::Deleting,
            (false, false) => {
                let min_age = self.incomplete.unwrap_or(Duration::MAX);
                Doomed::Incomplete { min_age, now: self.time() }
            }
        };
        let formats = &self.run.opener.formats;
        let name = step.name.clone();
        let (reason, failed) = match (Deletion { storage, formats }).run(&name, why).await {
            Ok(Outcome::Deleted { files, bytes }) => {
                report.files = report.files.saturating_add(files);
                report.bytes = report.bytes.saturating_add(bytes);
                report.deleted.push(Deleted { name, step: step.step, files, bytes });
                return;
            }
            Ok(Outcome::Kept(reason)) => (reason, false),
            Err(error) => (error_chain(&error), true),
        };
        report.not_deleted.push(NotDeleted { name, step: step.step, reason, failed });
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
