//! Running a command's work so that Ctrl-C stops it cleanly.
//!
//! The first SIGINT, SIGTERM or SIGHUP drops the work, which ends uploads and with them their temporary
//! files, and removes what the command has completed so far. The second ends the process at once.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dcp::jobs::group::JobGroup;
use dcp::jobs::rollback::{Quiet, Rollback, Undone};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use tokio::sync::oneshot;

use crate::failure::{Exit, Failure};

/// A stop that takes longer explains itself on a terminal.
const PATIENCE: Duration = Duration::from_secs(1);

/// Lets a write beyond the limit of file sizes (`ulimit -f`) fail, as on a full disk. By default, its
/// signal ends the process without a message and with everything that it has written left behind.
pub(crate) fn survive_file_size_limit() {
    if let Err(error) = signal_hook::flag::register(SIGXFSZ, Arc::default()) {
        tracing::warn!(%error, "cannot watch for the limit of file sizes");
    }
}

/// Runs a command's work. Work that is `long` gets a runtime of several threads and can be
/// stopped; other work has nothing to clean up, so that signals may end it as they do by default.
pub(crate) fn run<T>(
    long: bool,
    rollback: &Rollback,
    group: Option<&JobGroup>,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    if !long {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(work);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let signal = watch_signals();
    let outcome = runtime.block_on(async {
        tokio::select! {
            // Work that is done when the signal comes was not interrupted.
            biased;
            done = work => Ok(done),
            signal = stopped(signal, rollback) => Err(signal),
        }
    });
    // Waits for the threads that write: they own the temporary files and remove them.
    drop(runtime);
    outcome.unwrap_or_else(|(signal, quiet)| {
        // Rank 0 may be committing what this one has written.
        if group.is_some_and(JobGroup::has_handed_over) {
            let text = "interrupted; what was written is left to rank 0";
            return Err(Failure::new(exit(signal), text));
        }
        Err(interrupted(signal, rollback, quiet))
    })
}

/// The signal, once nothing is being put under its final name, and what keeps it so.
async fn stopped(signal: oneshot::Receiver<i32>, rollback: &Rollback) -> (i32, Quiet) {
    let Ok(signal) = signal.await else { return std::future::pending().await };
    (signal, rollback.quiesce().await)
}

/// Tests run many commands in one process, so a signal must not stop one of them.
#[cfg(test)]
fn watch_signals() -> oneshot::Receiver<i32> {
    let _: fn() -> oneshot::Receiver<i32> = watch_signals_of_process;
    oneshot::channel().1
}

#[cfg(not(test))]
use watch_signals_of_process as watch_signals;

/// Returns the first signal through the channel. A second one ends the process.
fn watch_signals_of_process() -> oneshot::Receiver<i32> {
    let (first_signal, received) = oneshot::channel();
    let watch = move |mut signals: Signals| {
        let mut signals = signals.forever();
        let Some(first) = signals.next() else { return };
        if first_signal.send(first).is_err() {
            // The work has ended, so nothing is left to stop.
            std::process::exit(exit(first) as i32);
        }
        // A script has no second Ctrl-C to give, and reads the error from standard error.
        if std::io::stderr().is_terminal() {
            thread::spawn(|| {
                thread::sleep(PATIENCE);
                let text = "waiting for writes in progress; press Ctrl-C again to stop at once";
                // The message is a courtesy: a closed terminal changes nothing.
                let _ = writeln!(std::io::stderr(), "{text}");
            });
        }
        if let Some(second) = signals.next() {
            std::process::exit(exit(second) as i32);
        }
    };
    let started = Signals::new([SIGHUP, SIGINT, SIGTERM])
        .and_then(|signals| thread::Builder::new().spawn(move || watch(signals)));
    if let Err(error) = started {
        tracing::warn!(%error, "cannot watch for signals");
    }
    received
}

fn exit(signal: i32) -> Exit {
    match signal {
        SIGTERM => Exit::Terminated,
        SIGHUP => Exit::HungUp,
        _ => Exit::Interrupted,
    }
}

fn interrupted(signal: i32, rollback: &Rollback, quiet: Quiet) -> Failure {
    let failure = |text: &str| Failure::new(exit(signal), text);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let undone = match runtime {
        Ok(runtime) => runtime.block_on(rollback.undo(quiet)),
        Err(error) => {
            return failure("interrupted; what was written stays").because(vec![error.to_string()]);
        }
    };
    match undone {
        Undone::Nothing => failure("interrupted"),
        Undone::All => failure("interrupted; nothing was written"),
        Undone::Replaced(key) => {
            failure(&format!("interrupted after {key:?} was replaced; what was written stays"))
                .hint("run the command again, or `dcp verify` what is there")
        }
        Undone::Left(left) => {
            failure(&format!("interrupted; {} could not be removed", left.join(", ")))
        }
        _ => failure("interrupted"),
    }
}
