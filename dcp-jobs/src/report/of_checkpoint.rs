//! The report of a checkpoint by its URL.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::whole::Whole;
use crate::error::Error;
use crate::options::JobOptions;
use crate::report::{Report, ReportLimits};

impl Checkpoint {
    /// Describes this checkpoint for a page to look around in, which
    /// [`render_html`](crate::report::render_html) makes; with the statistics of all tensors
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
        let mut report = crate::report::report(&checkpoint.source, &name, job, limits).await?;
        if stats {
            let stats = checkpoint.stats().job(job.clone()).run().await?;
            report.add_stats(&stats, limits);
        }
        Ok(report)
    }
}
