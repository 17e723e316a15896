//! Options of commands that write.

use clap::Args;
use dcp::jobs::JobOptions;
use dcp::planner::KeyFilter;

use super::parse::parse_bytes;

/// Options of everything that writes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Writing")]
pub(crate) struct Writing {
    /// Replace the target if it exists; until the new one is complete, the old one stays.
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Print what would be written, and write nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Print a JSON report.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    callables: AllowCallable,

    /// Tensor data to hold in memory at once, such as 64MiB.
    #[arg(hide_short_help = true, long, value_name = "BYTES", default_value = "256MiB", value_parser = parse_bytes)]
    max_memory: u64,

    /// Reads in flight.
    #[arg(hide_short_help = true, short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: u16,
}

impl Writing {
    /// `options` with these settings.
    pub(crate) fn options(&self, options: JobOptions) -> JobOptions {
        options
            .with_max_memory(self.max_memory)
            .with_parallelism(usize::from(self.jobs))
            .with_dry_run(self.dry_run)
            .with_callables(self.callables.filter())
    }
}

/// What Python may run when it loads what is written.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct AllowCallable {
    /// Write objects with this Python class or function too, although loading them runs it and it
    /// is not known to be harmless. A GLOB of whole names (`mypackage.*`), or the
    /// beginning of names up to a dot (`mypackage`); may be given again.
    #[arg(hide_short_help = true, long, value_name = "GLOB")]
    allow_callable: Vec<String>,
}

impl AllowCallable {
    /// The names that are admitted.
    pub(crate) fn filter(&self) -> KeyFilter {
        KeyFilter::any_of(&self.allow_callable)
    }
}
