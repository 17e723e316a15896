//! The checkpoints of one training run: which there are, which one is valid, which are kept.
//!
//! [`Opener::run`] is the entry. A run is a folder whose folders are named after steps
//! ([`StepNaming`]); other files and folders in it are never changed. A small file in the folder of
//! a checkpoint pins it, another one has its metrics; PyTorch, OLMo-core and Megatron-Core ignore
//! both.

mod delete;
mod prune;
mod retention;
mod schedule;
mod sidecar;
mod step_name;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use dcp_convert::list_run;
use dcp_convert::open::RunEntry;
use dcp_core::format::{Listing, Place};
use dcp_core::registry::Access;
use dcp_core::storage::{FolderEntry, ObjectMeta};
use dcp_core::text::without_secrets;
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use dcp_megatron::{Tracked, write_tracker};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;

use crate::error::{Error, ErrorKind};
use crate::opener::Opener;
use crate::uri::below;

pub use prune::{
    Deleted, LeftBehind, LeftBehindKind, NotDeleted, Planned, Prune, PrunePlan, PruneReport,
};
pub use retention::{
    AllOf, AnyOf, Decision, KeepBest, KeepEvery, KeepLast, KeepSteps, KeepYoungerThan, Retention,
    StepFacts, decide,
};
pub use schedule::SaveSchedule;
pub use step_name::StepNaming;

use sidecar::Sidecars;

impl Opener {
    /// The run in the folder at a URL.
    ///
    /// ```no_run
    /// use dcp_checkpoint::run::{AnyOf, KeepEvery, KeepLast};
    ///
    /// # async fn example(opener: dcp_checkpoint::Opener) -> Result<(), dcp_checkpoint::Error> {
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
    /// What to open to read it, relative to the run; `None` where nothing can be read.
    pub checkpoint: Option<String>,
    /// The name of its format; empty where only files that belong to no format are left.
    pub format: &'static str,
    /// Whether all is there that its format needs; `None` where that is unknown.
    pub complete: Option<bool>,
    /// Why it is not complete.
    pub problem: Option<String>,
    /// Files in its folder.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When the last of them was written, in seconds since 1970, if the storage has it.
    pub modified: Option<u64>,
    /// The metrics that were recorded for it.
    pub metrics: BTreeMap<String, f64>,
    /// Whether it is pinned.
    pub pinned: bool,
    /// Whether the tracker file of the run names it.
    pub tracked: bool,
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
        }
    }

    /// Whether all is there that its format needs.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete == Some(true)
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
    /// What is wrong with it.
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
        self.look(&storage).await.map_err(|error| self.cannot_read(error))
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
    /// ones that do not. With `deep` every byte is read and compared with its checksum.
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

    /// What is wrong with the checkpoint in a folder.
    async fn problem_of(&self, name: &str, deep: bool) -> Result<Option<String>, Error> {
        let verified = async {
            let checkpoint = self.opener.open(&below(&self.url, name)).await?;
            checkpoint.verify().deep(deep).run().await
        };
        match verified.await {
            Ok(report) if report.ok => Ok(None),
            Ok(report) => {
                let first = report.problems.first();
                let text = first.map_or("it does not verify", |problem| &problem.message);
                Ok(Some(text.to_owned()))
            }
            Err(error) if error.is_retryable() => Err(error),
            Err(error) => Ok(Some(dcp_core::error::error_chain(&error))),
        }
    }

    /// Pins the checkpoints of a step: no policy and no `dcp prune` deletes them. The pin is a
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
        if naming == StepNaming::Iteration {
            write_tracker(&*storage, Tracked::Iteration(step)).await?;
        }
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
                .with_hint("`dcp ls` lists the checkpoints of a run"));
        }
        let storage = self.open(Access::Write).await?;
        let folders = found.iter().map(|one| Ok((Arc::clone(&storage), Key::new(&one.name)?)));
        folders.collect::<Result<_, StorageError>>().map_err(Error::from)
    }

    async fn open(&self, access: Access) -> Result<Arc<dyn Storage>, Error> {
        let opened = self.opener.storages().open(&self.url, access).await;
        opened.map_err(|error| match error.kind() {
            StorageErrorKind::NotFound => {
                let message = format!("there is no run at {:?}", self.url);
                Error::new(ErrorKind::NotFound, message).because(error)
            }
            _ => Error::from(error).context(format!("cannot open {:?}", self.url)),
        })
    }

    fn cannot_read(&self, error: StorageError) -> Error {
        Error::from(error).context(format!("cannot list the run {:?}", self.url))
    }

    /// The checkpoints, in ascending order of steps.
    async fn look(&self, storage: &Arc<dyn Storage>) -> Result<Vec<RunStep>, StorageError> {
        let listing = list_run(storage, &self.opener.formats).await?;
        let (mut files, mut folders) = (Vec::new(), BTreeSet::new());
        let mut root = storage.list_folder(None);
        while let Some(entry) = root.try_next().await? {
            match entry {
                FolderEntry::Object(meta) => files.push(meta),
                FolderEntry::Folder(key) => {
                    folders.insert(key.file_name().to_owned());
                }
                _ => {}
            }
        }
        let tracked = self.tracked(storage, files).await?;
        let entries: BTreeMap<_, _> = listing
            .entries
            .into_iter()
            .filter(|entry| !entry.kind.is_file() && folders.contains(&entry.name))
            .map(|entry| (entry.name.clone(), entry))
            .collect();
        let named = folders.iter().filter_map(|name| {
            let (_, step) =
                StepNaming::parse(name).or_else(|| StepNaming::parse_temporary(name))?;
            Some((name, step))
        });
        let read = named.map(|(name, step)| {
            let entry = entries.get(name);
            let is_tracked = tracked.as_ref() == Some(name);
            async move {
                let sidecars = Sidecars::read(&**storage, &Key::new(name)?).await?;
                Ok::<_, StorageError>(run_step(name, step, entry, sidecars, is_tracked))
            }
        });
        let parallelism = usize::from(storage.capabilities().parallelism.max(1));
        let read: Vec<_> = read.collect();
        let found = stream::iter(read).buffer_unordered(parallelism).try_collect::<Vec<_>>();
        let mut steps: Vec<_> = found.await?.into_iter().flatten().collect();
        steps.sort_by(|a, b| (a.step, a.modified, &a.name).cmp(&(b.step, b.modified, &b.name)));
        Ok(steps)
    }

    /// The folder that the tracker of the run names.
    async fn tracked(
        &self,
        storage: &Arc<dyn Storage>,
        files: Vec<ObjectMeta>,
    ) -> Result<Option<String>, StorageError> {
        let place = Place::folder(storage, Listing::new(files));
        for format in self.opener.formats.formats() {
            if let Some(tracker) = format.tracker(&place).await? {
                return Ok(tracker.folder.ok());
            }
        }
        Ok(None)
    }
}

/// A folder with the name of a step; `None` where it is neither a checkpoint nor the rest of one.
fn run_step(
    name: &str,
    step: u64,
    entry: Option<&RunEntry>,
    sidecars: Sidecars,
    tracked: bool,
) -> Option<RunStep> {
    let Sidecars { pinned, deleting, saved_again, metrics } = sidecars;
    let mut complete = match entry {
        Some(entry) => entry.complete,
        None => Some(false),
    };
    let deleting = deleting.is_some_and(|mark| {
        let is_spared =
            entry.is_some_and(|entry| complete != Some(false) && mark.spares(entry.kind.format()));
        !(is_spared || saved_again && entry.is_some())
    });
    if entry.is_none() && !deleting {
        return None;
    }
    if deleting {
        complete = Some(false);
    }
    let problem = match deleting {
        true => Some("its deletion did not end".to_owned()),
        false => entry.and_then(|entry| entry.problem.clone()),
    };
    Some(RunStep {
        name: name.to_owned(),
        step,
        checkpoint: entry.and_then(|entry| entry.checkpoint.clone()),
        format: entry.map_or("", |entry| entry.kind.format()),
        complete,
        problem,
        files: entry.map_or(0, |entry| entry.files),
        bytes: entry.map_or(0, |entry| entry.bytes),
        modified: entry.and_then(|entry| entry.modified),
        metrics,
        pinned,
        tracked,
        deleting,
    })
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
    fn a_verification_can_be_spawned(checkpoint: &crate::Checkpoint) {
        is_send(checkpoint.verify().deep(true).run());
    }
}
