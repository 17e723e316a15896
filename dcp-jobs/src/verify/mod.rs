//! Checking that a checkpoint is whole.

mod verify_source;

use std::collections::BTreeSet;

use dcp_core::error::error_chain;
use dcp_core::format::Evidence;
use dcp_core::{Key, StorageError, StorageErrorKind};
use dcp_formats::find_incomplete_files;
use dcp_formats::hf::CONFIG_NAME;
use dcp_formats::incomplete_files::{IncompleteFile, LFS_PROBLEM};

use crate::checkpoint::open::read_all_the_same;
use crate::checkpoint::setters::job_options;
use crate::checkpoint::uri::below;
use crate::checkpoint::whole::Whole;
use crate::checkpoint::{Checkpoint, model_files};
use crate::error::Error;
use crate::integrity::{Problem, ProblemKind};
use crate::options::JobOptions;
use crate::place::same_place::{Work, same_sources};

pub use crate::integrity::VerifyReport;
pub use verify_source::verify;

impl Checkpoint {
    /// Checks that this checkpoint is whole: its structure, and with
    /// [`deep`](Verification::deep) every byte.
    ///
    /// ```
    /// # use dcp_jobs::Opener;
    /// # use dcp_core::registry::StorageRegistry;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mut storages = StorageRegistry::empty();
    /// # storages.register("file", |request| Ok(std::sync::Arc::new(dcp_storage_fs::FsStorage::open(&request.url)?)));
    /// # let url = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/pytorch/t21_plain");
    /// let checkpoint = Opener::new(storages).open(url).await?;
    /// let report = checkpoint.verify().deep(true).run().await?;
    /// assert!(report.ok, "{:?}", report.problems);
    /// # Ok(())
    /// # }
    /// ```
    pub fn verify(&self) -> Verification<'_> {
        Verification { checkpoint: self, deep: false, job: JobOptions::default() }
    }
}

/// A check to [`run`](Self::run), from [`Checkpoint::verify`].
#[derive(Debug)]
#[must_use = "a check does nothing before `run`"]
pub struct Verification<'a> {
    checkpoint: &'a Checkpoint,
    deep: bool,
    job: JobOptions,
}

impl Checkpoint {
    /// The folders of a checkpoint of several parts that are beside the opened one, such as the optimizer of
    /// accelerate beside the model.
    pub(crate) fn other_parts(&self) -> Vec<String> {
        let folder = self.step.listing().root();
        let found = self.opener.formats.classify(&folder).map(|found| found.found);
        let found = found.filter(|found| found.evidence == Evidence::Run);
        let Some(inner) = found.and_then(|found| found.inner) else { return Vec::new() };
        let mut parts = self.opener.formats.checkpoints_below(&folder);
        parts.retain(|part| *part != inner);
        parts
    }
}

/// The incomplete files that the format of the checkpoint neither names nor owns, where everything else is
/// whole.
async fn strays(checkpoint: &Checkpoint, incomplete: &[IncompleteFile]) -> Result<Vec<Key>, Error> {
    if incomplete.is_empty() {
        return Ok(Vec::new());
    }
    match checkpoint.examined().await {
        Ok(examined) => Ok(examined.strays),
        Err(error) if error.is_retryable() => Err(error),
        Err(_) => Ok(Vec::new()),
    }
}

/// Adds the report of another part of the checkpoint.
fn add_part(report: &mut VerifyReport, part: &str, other: VerifyReport) {
    report.ok &= other.ok;
    report.tensors += other.tensors;
    report.objects += other.objects;
    report.files += other.files;
    report.bytes_checked = report.bytes_checked.saturating_add(other.bytes_checked);
    report.problems.extend(other.problems.into_iter().map(|mut problem| {
        problem.file = problem.file.map(|file| format!("{part}/{file}"));
        problem
    }));
    report.notes.extend(other.notes.into_iter().map(|note| format!("{part}: {note}")));
}

/// The reason that the configuration of a model cannot be read, as a link out of its folder: conversions read it.
async fn unread_config(checkpoint: &Checkpoint) -> Result<Option<String>, Error> {
    let config = Key::new(CONFIG_NAME).map_err(StorageError::from)?;
    match checkpoint.step.storage().stat(&config).await {
        Err(error) if error.kind() == StorageErrorKind::Link => Ok(Some(error_chain(&error))),
        // What is not there, conversions do without; what fails now fails in what reads it.
        _ => Ok(None),
    }
}

impl Verification<'_> {
    job_options!();

    /// Whether every byte is read and compared with its checksum.
    pub fn deep(mut self, deep: bool) -> Self {
        self.deep = deep;
        self
    }

    /// Checks the checkpoint, and every file of safetensors or `torch.save` in its folder: a resume needs
    /// the trainer's state too. A framework checks its own in addition; of one in a run, the tracker is checked.
    ///
    /// # Errors
    ///
    /// When the storage fails; damage is in the report.
    pub async fn run(self) -> Result<VerifyReport, Error> {
        let checkpoint = &*Whole::with_all_keys(self.checkpoint).await?;
        let work = Work::new("verification", &self.job).option("`Verification::deep`", &self.deep);
        same_sources(&self.job, work, &[checkpoint]).await?;
        let mut report = match checkpoint.of_framework() {
            Some(of) => of.verify(self.deep, &self.job).await?,
            None => verify(&checkpoint.source, self.deep, &self.job).await?,
        };
        let found: BTreeSet<String> =
            report.problems.iter().filter_map(|problem| problem.file.clone()).collect();
        let mut add = |kind, file: &str, message: String| {
            let file = Some(file.to_owned());
            report.problems.push(Problem { kind, file, message, ..Problem::default() });
            report.ok = false;
        };
        if checkpoint.is_folder && self.job.is_coordinator() {
            let incomplete = find_incomplete_files(&checkpoint.step).await?;
            let strays = strays(checkpoint, &incomplete).await?;
            for IncompleteFile { file, problem, .. } in incomplete {
                let is_stray = strays.contains(&file);
                let kind = if is_stray { ProblemKind::StrayFile } else { ProblemKind::ShortFile };
                // What the format itself has found says more.
                if !found.contains(file.as_str()) {
                    add(kind, file.as_str(), format!("the file {problem}"));
                }
            }
        }
        if self.job.is_coordinator() {
            let pointers = model_files::pointers_of(checkpoint).await?;
            report.notes.extend(pointers.iter().map(|file| format!("{file} {LFS_PROBLEM}")));
        }
        if !found.is_empty()
            && self.job.is_coordinator()
            && let Some(pointer) = checkpoint.unfetched_data().await?
        {
            add(ProblemKind::ShortFile, pointer.as_str(), format!("the file {LFS_PROBLEM}"));
        }
        if checkpoint.is_model_folder()
            && self.job.is_coordinator()
            && let Some(problem) = unread_config(checkpoint).await?
        {
            add(ProblemKind::MissingFile, CONFIG_NAME, problem);
        }
        if let Some(unfinished) = &checkpoint.unfinished {
            let note = read_all_the_same(unfinished);
            add(ProblemKind::MissingFile, unfinished.file, note);
        }
        if let Some((tracker, problem)) = &checkpoint.tracker_problem {
            add(ProblemKind::Index, tracker, problem.clone());
        }
        for part in checkpoint.other_parts() {
            let opened =
                checkpoint.opener.unheard().open(&below(&checkpoint.step_uri, &part)).await?;
            let verification = opened.verify().deep(self.deep).job(self.job.clone());
            add_part(&mut report, &part, Box::pin(verification.run()).await?);
        }
        if report.damage().is_none() && self.job.is_coordinator() {
            let examined = checkpoint.examined().await?;
            // Damaged files of others are in the report.
            let problem = examined.problem.filter(|_| examined.strays.is_empty());
            let Some(problem) = problem else { return Ok(report) };
            let mut incomplete = Problem::default();
            (incomplete.kind, incomplete.message) = (ProblemKind::MissingFile, problem);
            report.problems.push(incomplete);
            report.ok = false;
        }
        Ok(report)
    }
}
