//! Differences of two checkpoints.

mod diff_sources;
mod on_ranks;
mod report;
mod segments;
mod whole;

use std::collections::HashSet;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::setters::job_options;
use crate::checkpoint::whole::Whole;
use crate::error::Error;
use crate::options::JobOptions;
use crate::place::same_place::{Work, same_sources};

pub use diff_sources::{DiffOptions, diff};
pub use report::{
    Described, DiffCounts, DiffReport, DiffScope, Difference, DifferenceKind, Spot, ValueDifference,
};

impl Checkpoint {
    /// Compares the keys, shapes, dtypes and values of this checkpoint with those of another.
    ///
    /// ```no_run
    /// # use dcp_jobs::{Checkpoint, Error};
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
        let mut report = diff(&a.source, &b.source, options, &self.job).await?;
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
