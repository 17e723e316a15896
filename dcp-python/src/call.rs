//! Calls that take long: without the GIL, and ended by Ctrl-C.

use std::time::Duration;

use pyo3::prelude::*;

use crate::failure::Failure;

/// The interval at which a call of the main thread looks for signals.
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
    let watches = is_main_thread(py)?;
    py.detach(|| {
        dcp::block_on(async {
            tokio::select! {
                done = make() => done.map_err(Into::into),
                error = signal(), if watches => Err(Failure::Interrupted(error)),
            }
        })
    })?
}

/// Waits until a signal handler of Python raises.
async fn signal() -> PyErr {
    loop {
        tokio::time::sleep(LOOK).await;
        if let Err(error) = Python::attach(|py| py.check_signals()) {
            return error;
        }
    }
}

fn is_main_thread(py: Python<'_>) -> Result<bool, Failure> {
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?;
    Ok(threading.call_method0("current_thread")?.is(&main))
}
