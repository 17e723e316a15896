//! Runs one clause as a trial, with a timeout and a message.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use dcp_core::error::error_chain;
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::{Builder, Runtime};

/// The time after which a clause counts as hung. A conforming plug-in takes a few seconds; a busy
/// machine can take many times as long.
pub const CASE_TIMEOUT: Duration = Duration::from_secs(300);

/// Runs trials with the process's arguments, like the harness of `cargo test`.
#[must_use]
pub fn run(trials: Vec<Trial>) -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs trials without the arguments of the process, as in an example or in a test of one's own;
/// whether all of them pass. What fails is printed.
#[must_use]
pub fn passes(trials: Vec<Trial>) -> bool {
    !libtest_mimic::run(&Arguments::default(), trials).has_failed()
}

/// The reason why a clause fails.
///
/// Can be created from any error, with its causes.
#[derive(Debug)]
pub(crate) struct Failure(String);

pub(crate) type Outcome = Result<(), Failure>;

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    pub(crate) fn message(&self) -> &str {
        &self.0
    }

    fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let message = panic
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        Self(format!("it panicked: {message}"))
    }
}

impl<E: std::error::Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error_chain(&error))
    }
}

/// Fails the clause with a formatted message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::case::Failure::new(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;

/// The runtime that all asynchronous clauses of the process share, because clients of remote
/// storages bind their connections to the runtime that opened them.
///
/// Lives as long as the process: shutting it down would wait for a hung clause.
pub(crate) fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        Builder::new_multi_thread()
            .worker_threads(8)
            .enable_all()
            .build()
            .unwrap_or_else(|error| panic!("cannot start a tokio runtime: {error}"))
    })
}

/// Runs an asynchronous clause until it ends, panics, or exceeds the timeout.
pub(crate) fn run_future<F>(timeout: Duration, future: F) -> Outcome
where
    F: Future<Output = Outcome> + Send + 'static,
{
    let task = runtime().spawn(future);
    let (sender, receiver) = mpsc::channel();
    runtime().spawn(async move {
        let outcome = match task.await {
            Ok(outcome) => outcome,
            Err(error) => Err(match error.try_into_panic() {
                Ok(panic) => Failure::of_panic(&*panic),
                Err(error) => error.into(),
            }),
        };
        // The receiver is gone only after a timeout, which was reported.
        let _ = sender.send(outcome);
    });
    wait(timeout, &receiver)
}

/// Runs a blocking clause on its own thread until it ends, panics, or exceeds the timeout.
pub(crate) fn run_thread<F>(timeout: Duration, case: F) -> Outcome
where
    F: FnOnce() -> Outcome + Send + 'static,
{
    let (sender, receiver) = mpsc::channel();
    std::thread::Builder::new().name("clause".into()).spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(case))
            .unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)));
        // The receiver is gone only after a timeout, which was reported.
        let _ = sender.send(outcome);
    })?;
    wait(timeout, &receiver)
}

fn wait(timeout: Duration, receiver: &mpsc::Receiver<Outcome>) -> Outcome {
    match receiver.recv_timeout(timeout) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => {
            Err(Failure::new(format!("it did not end within {timeout:?}")))
        }
        Err(RecvTimeoutError::Disconnected) => Err(Failure::new("it ended without an outcome")),
    }
}

/// Converts an outcome for the harness.
pub(crate) fn report(outcome: Outcome) -> Result<(), Failed> {
    outcome.map_err(|failure| Failed::from(failure.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clause_that_hangs_or_panics_fails() {
        let hung = run_future(Duration::ZERO, std::future::pending()).unwrap_err();
        assert!(hung.message().contains("did not end"), "{hung:?}");
        let hung = run_thread(Duration::ZERO, || {
            loop {
                std::thread::park();
            }
        });
        assert!(hung.unwrap_err().message().contains("did not end"));
        let panicked = run_future(CASE_TIMEOUT, async { panic!("boom {}", 1) }).unwrap_err();
        assert_eq!(panicked.message(), "it panicked: boom 1");
        let panicked = run_thread(CASE_TIMEOUT, || panic!("bang")).unwrap_err();
        assert_eq!(panicked.message(), "it panicked: bang");
    }
}
