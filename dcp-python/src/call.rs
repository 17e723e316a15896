//! Calls that take long: without the GIL, and ended by Ctrl-C.

use std::time::Duration;

use pyo3::prelude::*;

use crate::failure::Failure;
use crate::progress::Progress;

/// The interval at which a call looks for signals and for exceptions of its progress function.
const LOOK: Duration = Duration::from_millis(50);

/// Runs the future that `make` returns to its end, on this thread and without the GIL.
///
/// Python runs handlers of signals in its main thread alone, and only while Python code runs there. So a call of
/// that thread takes the GIL now and then and lets Python look. When a handler raises, the future is dropped: what
/// it was writing has no name yet, as after a kill, and its temporary files go with it.
pub(crate) fn run<T: Send, E: Into<Failure>, F: Future<Output = Result<T, E>>>(
    py: Python<'_>,
    make: impl FnOnce() -> F + Send,
) -> Result<T, Failure> {
    run_with(py, None, make)
}

/// As [`run`], and an exception of the progress function ends it as well. A job that was done when the function raised
/// stays done.
pub(crate) fn run_with<T: Send, E: Into<Failure>, F: Future<Output = Result<T, E>>>(
    py: Python<'_>,
    progress: Option<&Progress>,
    make: impl FnOnce() -> F + Send,
) -> Result<T, Failure> {
    let on_main = is_main_thread(py)?;
    let done = py.detach(|| {
        dcp::block_on(async {
            tokio::select! {
                done = make() => done.map_err(Into::into),
                error = exception(on_main, progress) => Err(Failure::Interrupted(error)),
            }
        })
    })?;
    match progress.and_then(Progress::take_raised) {
        Some(error) => Err(Failure::Interrupted(error)),
        None => done,
    }
}

/// Waits until a signal handler of Python raises, or the progress function has.
async fn exception(on_main: bool, progress: Option<&Progress>) -> PyErr {
    if !on_main && progress.is_none() {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(LOOK).await;
        if let Some(error) = progress.and_then(Progress::take_raised) {
            return error;
        }
        if on_main && let Err(error) = Python::attach(|py| py.check_signals()) {
            return error;
        }
    }
}

fn is_main_thread(py: Python<'_>) -> Result<bool, Failure> {
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?;
    Ok(threading.call_method0("current_thread")?.is(&main))
}
