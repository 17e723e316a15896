//! Statistics and differences of values.

use std::collections::HashSet;

use dcp_convert::jobs::diff::{DiffOptions, DiffReport};
use dcp_convert::jobs::stats::StatsReport;
use dcp_convert::report::{Report, ReportLimits};
use dcp_convert::{JobOptions, Selection};

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::keys::taken_of;
use crate::notes::Notes;
use crate::same_place::{Work, same_sources};
use crate::setters::job_options;
use crate::whole::Whole;

impl Checkpoint {
    /// Computes statistics of the values of this checkpoint.
    ///
    /// ```no_run
    /// # async fn example(run: dcp_checkpoint::Checkpoint) -> Result<(), dcp_checkpoint::Error> {
    /// let stats = run.stats().run().await?;
    /// println!("{} tensors", stats.tensors.len());
    /// # Ok(())
    /// # }
    /// ```
    pub fn stats(&self) -> Statistics<'_> {
        let (selection, job) = (Selection::all(), JobOptions::default());
        Statistics { checkpoint: self, selection, key: None, job }
    }

    /// Compares the keys, shapes, dtypes and values of this checkpoint with those of another.
    ///
    /// ```no_run
    /// # use dcp_checkpoint::{Checkpoint, Error};
    /// # async fn example(a: Checkpoint, b: Checkpoint) -> Result<(), Error> {
    /// let report = a.diff(&b).run().await?;
    /// println!("equal: {}", report.equal);
    /// # Ok(())
    /// # }
    /// ```
    pub fn diff<'a>(&'a self, other: &'a Self) -> Comparison<'a> {
        let (options, job) = (DiffOptions::default(), JobOptions::default());
        Comparison { a: self, b: other, options, job }
    }

    /// Describes this checkpoint for a page to look around in, which
    /// [`render_html`](dcp_convert::report::render_html) makes; with the statistics of all tensors
    /// if `stats`.
    ///
    /// # Errors
    ///
    /// When the index, or with `stats` anything, cannot be read.
    pub async fn report(
        &self,
        stats: bool,
        limits: &ReportLimits,
        job: &JobOptions,
    ) -> Result<Report, Error> {
        let name = dcp_core::text::without_secrets(&self.uri);
        let checkpoint = Whole::with_all_keys(self).await?;
        let mut report =
            dcp_convert::report::report(&checkpoint.source, &name, job, limits).await?;
        if stats {
            let stats = checkpoint.stats().job(job.clone()).run().await?;
            report.add_stats(&stats, limits);
        }
        Ok(report)
    }

    /// Notes that the optimizer's state among `shown` is not that of the model.
    pub(crate) async fn note_optimizer(
        &self,
        shown: impl Fn(&str) -> bool + Send + Sync,
        job: &JobOptions,
        notes: &mut Notes,
    ) {
        // State that cannot be read is an error of whatever needs it.
        if let Ok(Some(problem)) = self.state_problem(&shown, job).await {
            notes.say(format!("{problem}; `Checkpoint::verify` says what of each"));
        }
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
                dcp_convert::find(&self.checkpoint.source, &fqn, None).await?;
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
        let mut report = dcp_convert::stats(source, &selection, &self.job).await?;
        // Rank 0 of a group has the report of all.
        let Some(job) = self.job.of_coordinator() else { return Ok(report) };
        let taken = taken_of(&selection, source).await?;
        checkpoint.note_optimizer(|fqn| taken.contains(fqn), &job, &mut notes).await;
        report.notes = notes.into_said();
        Ok(report)
    }
}

/// A comparison to [`run`](Self::run), from [`Checkpoint::diff`].
#[derive(Debug)]
#[must_use = "a comparison does nothing before `run`"]
pub struct Comparison<'a> {
    a: &'a Checkpoint,
    b: &'a Checkpoint,
    options: DiffOptions,
    job: JobOptions,
}

impl Comparison<'_> {
    job_options!();

    /// Names, tolerances, and what is compared.
    pub fn options(mut self, options: DiffOptions) -> Self {
        self.options = options;
        self
    }

    /// Compares the two. [Notes](DiffReport::notes) say if the optimizer's state of one is damaged. The
    /// ranks of a group divide the work, and rank 0 has the result.
    ///
    /// # Errors
    ///
    /// When something is damaged or cannot be read: damage is never a difference.
    pub async fn run(self) -> Result<DiffReport, Error> {
        let mut notes = self.a.opener.notes();
        let options = &self.options;
        let a = Whole::of_keys(self.a, &options.needed(&options.a)).await?;
        let b = Whole::of_keys(self.b, &options.needed(&options.b)).await?;
        let work = Work::divided("comparison", &self.job).option("what is compared", options);
        same_sources(&self.job, work, &[&a, &b]).await?;
        let mut report = dcp_convert::diff(&a.source, &b.source, options, &self.job).await?;
        // Rank 0 of a group has the report of all.
        let Some(job) = self.job.of_coordinator().filter(|_| !options.keys_only) else {
            return Ok(report);
        };
        for (checkpoint, side) in [(&a, &options.a), (&b, &options.b)] {
            let names = checkpoint.source.names().await?;
            let compared: HashSet<&str> = side
                .of(&names)?
                .into_iter()
                .filter(|key| options.compares(&key.fqn))
                .filter_map(|key| Some(&**names.at(key.entry)?.0))
                .collect();
            checkpoint.note_optimizer(|fqn| compared.contains(fqn), &job, &mut notes).await;
        }
        report.notes = notes.into_said();
        Ok(report)
    }
}
