//! Progress of long jobs on stderr: a bar on a terminal, occasional lines in a log.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp::jobs::JobOptions;
use dcp::jobs::options::JobProgress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;
use crate::output::style::size;

/// Work that is done sooner has no line in a log.
const FIRST_LINE: Duration = Duration::from_secs(2);
/// Between two lines.
const LINES_APART: Duration = Duration::from_secs(10);

/// Shows how far some work is, until it is dropped.
#[derive(Debug)]
pub(crate) struct Bar(Shown);

#[derive(Debug)]
enum Shown {
    Bar(ProgressBar),
    Lines(Arc<Lines>),
    Nothing,
}

impl Bar {
    /// Shows how far that is which is being done, such as `converting`.
    pub(crate) fn new(out: &Output, doing: &'static str) -> Self {
        if out.quiet {
            return Self(Shown::Nothing);
        }
        if !std::io::stderr().is_terminal() {
            let count = Count { begun: Instant::now(), done: 0, total: 0, next: FIRST_LINE };
            return Self(Shown::Lines(Arc::new(Lines { doing, count: Mutex::new(count) })));
        }
        let bar = ProgressBar::no_length();
        bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        let template = "{msg} {wide_bar:.cyan/black.dim} {bytes:>10} of {total_bytes}  \
                        {bytes_per_sec}  {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━╸─"));
        }
        bar.set_message(doing);
        Self(Shown::Bar(bar))
    }

    /// The options of a job that reports here.
    pub(crate) fn options(&self) -> JobOptions {
        let options = JobOptions::default();
        match &self.0 {
            Shown::Bar(bar) => options.with_progress(Arc::new(OnTerminal(bar.clone()))),
            Shown::Lines(lines) => options.with_progress(Arc::clone(lines) as Arc<dyn JobProgress>),
            Shown::Nothing => options,
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

struct OnTerminal(ProgressBar);

impl JobProgress for OnTerminal {
    fn start(&self, total_bytes: u64) {
        self.0.set_length(total_bytes);
        self.0.enable_steady_tick(Duration::from_millis(100));
    }

    fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

#[derive(Debug)]
struct Lines {
    doing: &'static str,
    count: Mutex<Count>,
}

#[derive(Debug)]
struct Count {
    begun: Instant,
    done: u64,
    total: u64,
    /// The time since the beginning at which the next line is due.
    next: Duration,
}

impl Count {
    /// Counts what was done, and returns whether a line is due when this time has passed.
    fn advance(&mut self, bytes: u64, passed: Duration) -> bool {
        self.done = self.done.saturating_add(bytes);
        // The end of the work has a line only if something was said before.
        let ends = self.done >= self.total && self.next > FIRST_LINE;
        let is_due = passed >= self.next || ends;
        if is_due {
            self.next = passed + LINES_APART;
        }
        is_due
    }
}

impl JobProgress for Lines {
    fn start(&self, total_bytes: u64) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        count.begun = Instant::now();
        count.total = total_bytes;
    }

    fn advance(&self, bytes: u64) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = count.begun.elapsed();
        if !count.advance(bytes, passed) {
            return;
        }
        let line = line(self.doing, count.done, count.total, passed);
        drop(count);
        // Best effort.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

/// `converting: 42%, 3.4 GiB of 8.0 GiB, 512 MiB/s, 9s left`.
fn line(doing: &str, done: u64, total: u64, passed: Duration) -> String {
    let done = done.min(total);
    let percent = (u128::from(done) * 100).checked_div(total.into()).unwrap_or(100);
    let seconds = passed.as_secs_f64().max(0.001);
    let rate = done as f64 / seconds;
    let time = if done >= total {
        format!("in {}", duration(seconds))
    } else if rate > 0.0 {
        format!("{} left", duration((total - done) as f64 / rate))
    } else {
        "time unknown".to_owned()
    };
    let (done, total, rate) = (size(done), size(total), size(rate as u64));
    format!("{doing}: {percent}%, {done} of {total}, {rate}/s, {time}")
}

/// `9s`, `2m 05s`, `3h 12m`.
fn duration(seconds: f64) -> String {
    let seconds = seconds.ceil() as u64;
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h {:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_tell_rate_and_time_left() {
        let said =
            |done, total, seconds| line("writing", done, total, Duration::from_secs(seconds));
        assert_eq!(
            said(2 << 30, 8 << 30, 4),
            "writing: 25%, 2.0 GiB of 8.0 GiB, 512 MiB/s, 12s left"
        );
        assert_eq!(
            said(8 << 30, 8 << 30, 125),
            "writing: 100%, 8.0 GiB of 8.0 GiB, 65.5 MiB/s, in 2m 05s"
        );
        assert_eq!(said(0, 1 << 20, 0), "writing: 0%, 0 B of 1.0 MiB, 0 B/s, time unknown");
        assert_eq!(said(0, 0, 1), "writing: 100%, 0 B of 0 B, 0 B/s, in 1s");
        assert_eq!(duration(3.0 * 3600.0 + 12.5 * 60.0), "3h 12m");
        assert!(said(u64::MAX, u64::MAX, 1).contains("100%"));
        assert!(said(1, u64::MAX, 9).ends_with(" left"));
    }

    #[test]
    fn short_work_has_no_line_and_lines_are_apart() {
        let seconds = Duration::from_secs;
        let count = || Count { begun: Instant::now(), done: 0, total: 100, next: FIRST_LINE };
        let mut short = count();
        assert!(!short.advance(40, seconds(0)));
        assert!(!short.advance(60, seconds(1)), "work that is done has no line");
        let mut long = count();
        assert!(!long.advance(40, seconds(1)));
        assert!(long.advance(20, seconds(2)));
        assert!(!long.advance(10, seconds(11)), "it is too soon for another");
        assert!(long.advance(10, seconds(12)));
        assert!(long.advance(20, seconds(13)), "the end is said");
    }
}
