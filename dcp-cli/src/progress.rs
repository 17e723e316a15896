//! The progress bar: on a terminal, after a moment, on stderr.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use dcp::convert::{JobOptions, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

/// A bar that is removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Bar(ProgressBar);

struct Reporter(ProgressBar);

impl Bar {
    /// A bar for what is being done, such as `converting`.
    pub(crate) fn new(out: &Output, doing: &'static str) -> Self {
        let bar = ProgressBar::no_length();
        let shown = !out.quiet && std::io::stderr().is_terminal();
        bar.set_draw_target(if shown {
            ProgressDrawTarget::stderr_with_hz(10)
        } else {
            ProgressDrawTarget::hidden()
        });
        let template = "{msg} {bar:32.cyan/black.dim} {bytes:>10} of {total_bytes}  \
                        {bytes_per_sec}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━╸─"));
        }
        bar.set_message(doing);
        Self(bar)
    }

    /// The options of a job that reports to this bar.
    pub(crate) fn options(&self) -> JobOptions {
        JobOptions::default().with_progress(Arc::new(Reporter(self.0.clone())))
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

impl Progress for Reporter {
    fn start(&self, total_bytes: u64) {
        self.0.set_length(total_bytes);
        self.0.enable_steady_tick(Duration::from_millis(100));
    }

    fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}
