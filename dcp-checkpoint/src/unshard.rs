//! Writing the model of a checkpoint as plain files, as OLMo-core does.

use dcp_convert::JobOptions;
use dcp_convert::keys::StatePart;
use dcp_olmo::{UnshardOptions, UnshardReport, unshard_checkpoint};

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::new_folders::NewFolders;
use crate::overlap_guard::{Shape, keep_apart};
use crate::refuse_incomplete::refuse_incomplete;
use crate::rollback::Rollback;
use crate::same_place::{SharedTarget, Work, same_sources};
use crate::setters::job_options;
use crate::target::{Place, TargetOptions};
use crate::whole::Whole;

impl Checkpoint {
    /// Writes what is below `model` of the state dict to files in the directory `target`, as
    /// OLMo-core's `unshard_checkpoint` does.
    ///
    /// ```no_run
    /// # use dcp_checkpoint::{Checkpoint, Error};
    /// # async fn example(step: Checkpoint) -> Result<(), Error> {
    /// let options = dcp_olmo::UnshardOptions::default().optim(true);
    /// let report = step.unshard("out").options(options).run().await?;
    /// println!("{} files", report.files.len());
    /// # Ok(())
    /// # }
    /// ```
    pub fn unshard(&self, target: impl Into<String>) -> Unsharding<'_> {
        Unsharding {
            checkpoint: self,
            target: target.into(),
            options: UnshardOptions::default(),
            job: JobOptions::default(),
            rollback: Rollback::new(),
        }
    }
}

/// An unshard to [`run`](Self::run), from [`Checkpoint::unshard`].
#[derive(Debug)]
#[must_use = "an unshard does nothing before `run`"]
pub struct Unsharding<'a> {
    checkpoint: &'a Checkpoint,
    target: String,
    options: UnshardOptions,
    job: JobOptions,
    rollback: Rollback,
}

impl Unsharding<'_> {
    job_options!();

    /// Sets how the model is divided into files, and of which format they are.
    pub fn options(mut self, options: UnshardOptions) -> Self {
        self.options = options;
        self
    }

    /// Records what is created in `rollback`.
    pub fn rollback(mut self, rollback: &Rollback) -> Self {
        self.rollback = rollback.clone();
        self
    }

    /// Writes the files.
    ///
    /// # Errors
    ///
    /// When there is no `model`, and those of [`Conversion::run`](crate::jobs::Conversion::run).
    pub async fn run(self) -> Result<UnshardReport, Error> {
        let checkpoint = Whole::of(self.checkpoint).await?;
        let work = Work::new("unshard", &self.job).option("how it unshards", &self.options);
        same_sources(&self.job, work, &[&checkpoint]).await?;
        keep_apart(&checkpoint, &self.target, Shape::Folder).await?;
        let part =
            if self.options.writes_optim() { StatePart::Everything } else { StatePart::Model };
        refuse_incomplete(&checkpoint, part, &self.job, &mut checkpoint.opener.notes()).await?;
        let shared = SharedTarget::begin(&self.job, Shape::Folder).await?;
        let folders = NewFolders::before(&self.target, &self.rollback);
        let options =
            TargetOptions::default().with_dry_run(self.job.dry_run).with_rollback(&self.rollback);
        let place = Place::new(&checkpoint.opener, &self.target, &options);
        let place = place.held_by_rank_0(self.job.is_coordinator());
        let storage = place.plain_files().await?;
        shared.agree(&self.target, &storage).await?;
        let report =
            unshard_checkpoint(&checkpoint.source, &storage, &self.options, &self.job).await?;
        place.release();
        if !self.job.dry_run {
            folders.keep();
        }
        Ok(report)
    }
}
