//! The checkpoints of one training run: which there are, which one is valid, which are kept.
//!
//! [`Opener::run`] is the entry. A run is a folder whose folders are named after steps
//! ([`StepNaming`]); other files and folders in it are never changed. A small file in the folder of
//! a checkpoint pins it, another one has its metrics; PyTorch, OLMo-core and Megatron-Core ignore
//! both.

mod delete;
pub(crate) mod index_files;
mod lightning;
mod links;
mod look;
mod model_left;
mod notes;
mod order;
mod protect;
mod prune;
mod recorded;
mod retention;
mod schedule;
mod sidecar;
mod state_files;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use dcp_core::registry::Access;
use dcp_core::text::without_secrets;
use dcp_core::{Key, Storage, StorageError};
use serde::Serialize;

use crate::checkpoint::open::cannot_open;
use crate::checkpoint::opener::{Need, Opener};
use crate::checkpoint::uri::below;
use crate::error::{Error, ErrorKind};
use crate::listing::RunListing;

pub use crate::checkpoint::step_naming::StepNaming;
pub(crate) use look::is_pointer;
pub use order::StepOrder;
pub use prune::{
    Deleted, LeftBehind, LeftBehindKind, NotDeleted, Planned, Prune, PrunePlan, PruneReport,
};
pub use retention::{
    AllOf, AnyOf, Decision, KeepBest, KeepEvery, KeepLast, KeepSteps, KeepYoungerThan, Retention,
    StepFacts, decide,
};
pub use schedule::SaveSchedule;

impl Opener {
    /// The run in the folder at a URL.
    ///
    /// ```no_run
    /// use dcp_jobs::run::{AnyOf, KeepEvery, KeepLast};
    ///
    /// # async fn example(opener: dcp_jobs::Opener) -> Result<(), dcp_jobs::Error> {
    /// let run = opener.run("s3://models/llama");
    /// let valid = run.latest_valid(false).await?;
    /// println!("{:?}; skipped {:?}", valid.step, valid.skipped);
    ///
    /// let policy = AnyOf::new().or(KeepLast(3)).or(KeepEvery(10_000));
    /// let report = run.prune().policy(policy).run().await?;
    /// println!("{} bytes are free again", report.bytes);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn run(&self, url: impl Into<String>) -> Run {
        Run { opener: self.unheard(), url: url.into() }
    }
}

/// The folder of a training run, from [`Opener::run`]. Looks at the storage with every call.
#[derive(Clone)]
pub struct Run {
    opener: Opener,
    url: String,
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("url", &without_secrets(&self.url)).finish_non_exhaustive()
    }
}

/// A checkpoint of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunStep {
    /// The name of its folder.
    pub name: String,
    /// The training step.
    pub step: u64,
    /// The path to open to read it, relative to the run; `None` where nothing can be read.
    pub checkpoint: Option<String>,
    /// The name of its format; empty where only files that belong to no format are left.
    pub format: &'static str,
    /// Whether all is there that its format needs; `None` where that is unknown.
    pub complete: Option<bool>,
    /// The reason that it is not complete.
    pub problem: Option<String>,
    /// The files that have the problem, where its format neither names nor owns any of them. The checkpoint itself is
    /// whole and [counts](Self::is_complete) as that, although `complete` is unknown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub strays: Vec<String>,
    /// Files in its folder.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The time of the last of them, in seconds since 1970, if the storage has it. Pins, metrics
    /// and marks of deletions do not count.
    pub modified: Option<u64>,
    /// The metrics that were recorded for it: by [`Run::record_metrics`], or in the log of the trainer
    /// of transformers.
    pub metrics: BTreeMap<String, f64>,
    /// Whether it is pinned.
    pub pinned: bool,
    /// Whether the tracker file of the run names it.
    pub tracked: bool,
    /// Other files and links of the run that name it or lead to it, each as a clause: a file `latest`, the
    /// link `best`, the best checkpoint of the trainer.
    pub named_by: Vec<String>,
    /// Whether its deletion has begun and did not end.
    pub deleting: bool,
}

impl RunStep {
    /// The facts for a retention policy.
    #[must_use]
    pub fn facts(&self) -> StepFacts {
        StepFacts {
            step: self.step,
            saved: self
                .modified
                .and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds))),
            metrics: self.metrics.clone(),
            pinned: self.pinned,
            complete: self.is_complete(),
            tracked: self.tracked,
            named_by: self.named_by.clone(),
        }
    }

    /// Whether all is there that its format needs.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete == Some(true) || !self.strays.is_empty()
    }

    /// Notes that a problem leaves unknown whether it is complete.
    fn count_as_unknown(&mut self, problem: String) {
        self.complete = None;
        self.problem = Some(problem);
        self.strays.clear();
    }
}

/// The newest valid checkpoint of a run, from [`Run::latest_valid`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LatestValid {
    /// The checkpoint; `None` where the run has no valid one.
    pub step: Option<RunStep>,
    /// The newer ones, the newest first.
    pub skipped: Vec<SkippedStep>,
}

/// A checkpoint that cannot be resumed from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SkippedStep {
    /// The name of its folder.
    pub name: String,
    /// The training step.
    pub step: u64,
    /// The problem with it.
    pub problem: String,
}

impl SkippedStep {
    /// A checkpoint with a problem.
    #[must_use]
    pub fn new(name: impl Into<String>, step: u64, problem: impl Into<String>) -> Self {
        Self { name: name.into(), step, problem: problem.into() }
    }
}

impl Run {
    /// The URL of its folder.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The URL of the folder of a step, under the name that `naming` gives it.
    #[must_use]
    pub fn step_url(&self, naming: StepNaming, step: u64) -> String {
        below(&self.url, &naming.folder(step))
    }

    /// Its checkpoints, in ascending order of steps, whatever their naming and format; those too
    /// whose save or deletion did not end.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ErrorKind::NotFound) where the folder does not exist, and when it cannot be opened
    /// or listed.
    pub async fn steps(&self) -> Result<Vec<RunStep>, Error> {
        let storage = self.open(Access::Read).await?;
        let found = self.look(&storage).await.map_err(|error| self.cannot_read(error))?;
        Ok(found.steps.into_iter().map(|one| one.step).collect())
    }

    /// The complete checkpoint of the highest step: complete by its index and the lengths of its
    /// files, not by the name of its folder.
    ///
    /// # Errors
    ///
    /// When the folder cannot be opened or listed.
    pub async fn latest(&self) -> Result<Option<RunStep>, Error> {
        Ok(self.steps().await?.into_iter().rfind(RunStep::is_complete))
    }

    /// The checkpoint of the highest step that [verifies](crate::Checkpoint::verify), with the newer
    /// ones that do not. With `deep` every byte is read and compared with its checksum. Files that its format
    /// neither names nor owns, and what Python would run when it loads an object, do not count against one.
    ///
    /// # Errors
    ///
    /// When the folder cannot be listed, or a storage fails in a way that may pass: a checkpoint is
    /// skipped for what is wrong with it, not for a connection that broke.
    pub async fn latest_valid(&self, deep: bool) -> Result<LatestValid, Error> {
        self.valid_of(self.steps().await?, deep).await
    }

    /// As [`latest_valid`](Self::latest_valid), of the checkpoints of steps before `step`.
    ///
    /// # Errors
    ///
    /// As [`steps`](Self::steps).
    pub async fn latest_valid_before(&self, step: u64, deep: bool) -> Result<LatestValid, Error> {
        let mut steps = self.steps().await?;
        steps.retain(|one| one.step < step);
        self.valid_of(steps, deep).await
    }

    /// A note where the highest complete step of a `listing` of this run is not the newest one; `None`
    /// where numbers and times agree.
    ///
    /// # Errors
    ///
    /// As [`steps`](Self::steps).
    pub async fn order_note(&self, listing: &RunListing) -> Result<Option<String>, Error> {
        let complete = listing.entries.iter().filter(|entry| entry.is_complete());
        let mut times: Vec<_> = complete
            .filter_map(|entry| Some((StepNaming::step_of(&entry.name)?, entry.modified?)))
            .collect();
        times.sort_unstable();
        if times.is_sorted_by_key(|(_, modified)| *modified) {
            return Ok(None);
        }
        // The listing has the times of pins, too.
        let steps = self.steps().await?;
        let complete = steps.iter().filter(|step| step.is_complete());
        Ok(order::disagreement(complete).map(order::describe))
    }

    /// Whether one of `steps`, the newest last, verifies.
    async fn valid_of(&self, steps: Vec<RunStep>, deep: bool) -> Result<LatestValid, Error> {
        let mut skipped = Vec::new();
        for step in steps.into_iter().rev() {
            let problem = match step.is_complete() {
                true => self.problem_of(&step.name, deep).await?,
                false => {
                    Some(step.problem.clone().unwrap_or_else(|| "it is not complete".to_owned()))
                }
            };
            let Some(problem) = problem else {
                return Ok(LatestValid { step: Some(step), skipped });
            };
            skipped.push(SkippedStep { name: step.name, step: step.step, problem });
        }
        Ok(LatestValid { step: None, skipped })
    }

    /// Finds the problem of the checkpoint in a folder.
    async fn problem_of(&self, name: &str, deep: bool) -> Result<Option<String>, Error> {
        let verified = async {
            // Ranks may differ: each of them reads its own.
            let opener = self.opener.unheard().need(Need::Readable);
            let checkpoint = opener.open(&below(&self.url, name)).await?;
            checkpoint.verify().deep(deep).run().await
        };
        match verified.await {
            Ok(report) => Ok(report.damage().map(|problem| problem.message.clone())),
            Err(error) if error.is_retryable() => Err(error),
            Err(error) => Ok(Some(dcp_core::error::error_chain(&error))),
        }
    }

    /// Pins the checkpoints of a step: no policy and no `Run::prune` deletes them. The pin is a
    /// file in the folder of the checkpoint.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ErrorKind::NotFound) when the run has no checkpoint of that step; those of the
    /// storage.
    pub async fn pin(&self, step: u64) -> Result<(), Error> {
        for (storage, folder) in self.folders_of(step).await? {
            sidecar::pin(&*storage, &folder).await?;
        }
        Ok(())
    }

    /// Ends the pin of the checkpoints of a step.
    ///
    /// # Errors
    ///
    /// As [`pin`](Self::pin).
    pub async fn unpin(&self, step: u64) -> Result<(), Error> {
        for (storage, folder) in self.folders_of(step).await? {
            sidecar::unpin(&*storage, &folder).await?;
        }
        Ok(())
    }

    /// Records metrics of the checkpoints of a step, in place of those that were recorded before.
    /// Values that are infinite or no number are left out.
    ///
    /// # Errors
    ///
    /// As [`pin`](Self::pin).
    pub async fn record_metrics(
        &self,
        step: u64,
        metrics: &BTreeMap<String, f64>,
    ) -> Result<(), Error> {
        for (storage, folder) in self.folders_of(step).await? {
            sidecar::write_metrics(&*storage, &folder, metrics).await?;
        }
        Ok(())
    }

    /// Notes a save that was committed: its metrics, in place of those of an earlier save of the step,
    /// and in the tracker file of the run, where the naming has one, the step. A reader of the tracker
    /// sees the old step or the new one. Nothing is listed.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn note_save(
        &self,
        naming: StepNaming,
        step: u64,
        metrics: &BTreeMap<String, f64>,
    ) -> Result<(), Error> {
        let storage = self.open(Access::Write).await?;
        let folder = Key::new(naming.folder(step)).map_err(StorageError::from)?;
        sidecar::write_metrics(&*storage, &folder, metrics).await?;
        self.opener.frameworks.note_latest(naming, &*storage, step).await?;
        Ok(())
    }

    /// The folders of a step, opened for writing.
    async fn folders_of(&self, step: u64) -> Result<Vec<(Arc<dyn Storage>, Key)>, Error> {
        let steps = self.steps().await?;
        let found: Vec<_> =
            steps.iter().filter(|one| one.step == step && !one.format.is_empty()).collect();
        if found.is_empty() {
            let message = format!("{:?} has no checkpoint of step {step}", self.url);
            return Err(Error::new(ErrorKind::NotFound, message)
                .with_hint("`Opener::list` lists the checkpoints of a run"));
        }
        let storage = self.open(Access::Write).await?;
        let folders = found.iter().map(|one| Ok((Arc::clone(&storage), Key::new(&one.name)?)));
        folders.collect::<Result<_, StorageError>>().map_err(Error::from)
    }

    async fn open(&self, access: Access) -> Result<Arc<dyn Storage>, Error> {
        let opened = self.opener.storages().open(&self.url, access).await;
        opened.map_err(|error| cannot_open(&self.url, error))
    }

    fn cannot_read(&self, error: StorageError) -> Error {
        Error::from(error).context(format!("cannot list the run {:?}", self.url))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_send<T: Send>(_: T) {}

    /// A trainer runs these on a runtime of several threads.
    #[test]
    fn what_a_run_does_can_be_spawned() {
        let run = Opener::new(dcp_core::registry::StorageRegistry::empty()).run("run");
        is_send(run.steps());
        is_send(run.latest_valid(true));
        is_send(run.note_save(StepNaming::Dash, 1, &BTreeMap::new()));
        is_send(run.prune().run());
        is_send(run.prune().apply(&PrunePlan::default()));
    }

    #[expect(dead_code, reason = "that it compiles is the test")]
    fn a_verification_can_be_spawned(checkpoint: &crate::checkpoint::Checkpoint) {
        is_send(checkpoint.verify().deep(true).run());
    }
}
