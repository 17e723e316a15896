//! Statistics of the values of a checkpoint.

mod exchange;
mod histogram;
mod moments;
mod objects;
mod report;
mod source_stats;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::chosen_keys::taken_of;
use crate::checkpoint::setters::job_options;
use crate::checkpoint::whole::Whole;
use crate::error::Error;
use crate::keys::select::Selection;
use crate::options::JobOptions;
use crate::place::same_place::{Work, same_sources};

pub use histogram::Histogram;
pub use objects::BAD_VALUES_MAX;
pub use report::{
    Anomaly, BadChunk, BadValue, FloatRange, Number, NumberStats, ObjectStats, StatsReport,
    TensorStats,
};
pub(crate) use source_stats::unravel;
pub use source_stats::{BAD_CHUNKS_MAX, stats};

impl Checkpoint {
    /// Computes statistics of the values of this checkpoint.
    ///
    /// ```no_run
    /// # async fn example(run: dcp_jobs::Checkpoint) -> Result<(), dcp_jobs::Error> {
    /// let stats = run.stats().run().await?;
    /// println!("{} tensors", stats.tensors.len());
    /// # Ok(())
    /// # }
    /// ```
    pub fn stats(&self) -> Statistics<'_> {
        let (selection, job) = (Selection::all(), JobOptions::default());
        Statistics { checkpoint: self, selection, key: None, job }
    }
}

/// Statistics to [`run`](Self::run), from [`Checkpoint::stats`].
#[derive(Debug)]
#[must_use = "statistics are computed by `run`"]
pub struct Statistics<'a> {
    checkpoint: &'a Checkpoint,
    selection: Selection,
    key: Option<String>,
    job: JobOptions,
}

impl Statistics<'_> {
    job_options!();

    /// Reads only these keys.
    pub fn selection(mut self, selection: Selection) -> Self {
        self.selection = selection;
        self
    }

    /// Reads only this tensor, which must exist.
    pub fn key(mut self, fqn: impl Into<Option<String>>) -> Self {
        self.key = fqn.into();
        self
    }

    /// Reads every byte of the keys once. A [note](StatsReport::notes) says if the optimizer's state is
    /// damaged. The ranks of a group divide the work, and rank 0 has the result.
    ///
    /// # Errors
    ///
    /// When something is damaged or cannot be read: damage is never a statistic.
    pub async fn run(self) -> Result<StatsReport, Error> {
        let mut notes = self.checkpoint.opener.notes();
        let selection = match self.key {
            None => self.selection,
            Some(fqn) => {
                crate::get::find(&self.checkpoint.source, &fqn, None).await?;
                let names = self.checkpoint.source.names().await?;
                let others = names.iter().map(|(name, _)| name).filter(|name| ***name != *fqn);
                let others = others.map(|name| (name.to_string(), None)).collect();
                Selection::all().with_mapping(others)
            }
        };
        let checkpoint = Whole::of_keys(self.checkpoint, &selection.needed()).await?;
        let work = Work::divided("statistics", &self.job).option("keys", &selection);
        same_sources(&self.job, work, &[&checkpoint]).await?;
        let source = &checkpoint.source;
        let mut report = stats(source, &selection, &self.job).await?;
        // Rank 0 of a group has the report of all.
        let Some(job) = self.job.of_coordinator() else { return Ok(report) };
        let taken = taken_of(&selection, source).await?;
        checkpoint.note_optimizer(|fqn| taken.contains(fqn), &job, &mut notes).await;
        report.notes = notes.into_said();
        Ok(report)
    }
}
