//! Jobs of plug-ins that write plain files of a checkpoint.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::Storage;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::format::Shape;
use crate::checkpoint::overlap_guard::keep_apart;
use crate::checkpoint::refuse_incomplete::refuse_incomplete;
use crate::checkpoint::whole::Whole;
use crate::error::Error;
use crate::keys::StatePart;
use crate::options::JobOptions;
use crate::place::same_place::{SharedTarget, Work, same_sources};
use crate::place::target::{Place, TargetOptions};
use crate::rollback::Rollback;
use crate::source::Source;

/// A job of a plug-in that writes plain files to a directory, beside others that are there. The ranks of a
/// group compare its `Debug`, so that has all of its options.
#[async_trait]
pub trait FileJob: fmt::Debug + Send + Sync {
    /// The files that were written.
    type Report;

    /// The name of the job, such as "unshard".
    fn name(&self) -> &'static str;

    /// The part of a training state that is read.
    fn part(&self) -> StatePart;

    /// Writes the files. With [`dry_run`](JobOptions::dry_run) nothing is written.
    ///
    /// # Errors
    ///
    /// Those of the job; what was written until then is removed by the caller's [`Rollback`].
    async fn write(
        &self,
        source: &Source,
        storage: &Arc<dyn Storage>,
        job: &JobOptions,
    ) -> Result<Self::Report, Error>;
}

impl Checkpoint {
    /// Runs a plug-in's job that writes plain files of this checkpoint to the directory `target`. The
    /// checkpoint has to be whole, and no other one may be at the target; what is created is recorded in
    /// `rollback`.
    ///
    /// # Errors
    ///
    /// Those of the job, and those of [`Conversion::run`](crate::convert::Conversion::run).
    pub async fn write_files<J: FileJob>(
        &self,
        target: &str,
        files: &J,
        rollback: &Rollback,
        job: &JobOptions,
    ) -> Result<J::Report, Error> {
        let checkpoint = Whole::of(self).await?;
        let options = format!("options of {}", files.name());
        let work = Work::new(files.name(), job).option(&options, files);
        same_sources(job, work, &[&checkpoint]).await?;
        keep_apart(&checkpoint, target, Shape::Folder).await?;
        let mut notes = checkpoint.opener.notes();
        refuse_incomplete(&checkpoint, files.part(), job, &mut notes).await?;
        let (shared, folders) = SharedTarget::begin(job, Shape::Folder, target, rollback).await?;
        let options = TargetOptions::default().with_dry_run(job.dry_run).with_rollback(rollback);
        let place = Place::new(&checkpoint.opener, target, &options);
        let place = place.held_by_rank_0(job.is_coordinator());
        let storage = place.plain_files().await?;
        shared.agree(target, &storage).await?;
        let report = files.write(&checkpoint.source, &storage, job).await?;
        place.release();
        if !job.dry_run {
            folders.keep();
        }
        Ok(report)
    }
}
