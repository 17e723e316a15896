//! The progress of jobs, by a function of Python.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp::jobs::options::JobProgress;
use pyo3::prelude::*;

/// Calls a function of Python with the bytes that are done and those in all, at most as often as a person reads them.
///
/// An exception of the function, such as a `KeyboardInterrupt` at Ctrl-C while it runs, ends the job: the job calls from
/// deep within, where nothing passes an exception on, so it is kept here, and [`call::run_with`](crate::call::run_with)
/// looks for it.
#[derive(Clone)]
pub(crate) struct Progress(Arc<Shared>);

struct Shared {
    function: Py<PyAny>,
    count: Mutex<Count>,
    raised: Mutex<Option<PyErr>>,
}

struct Count {
    done: u64,
    total: u64,
    called: Instant,
}

impl Progress {
    const INTERVAL: Duration = Duration::from_millis(100);

    /// The exception of the function, if it raised one.
    pub(crate) fn take_raised(&self) -> Option<PyErr> {
        self.0.raised.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn call(&self, done: u64, total: u64) {
        Python::attach(|py| {
            let Err(error) = self.0.function.call1(py, (done, total)) else { return };
            let mut raised = self.0.raised.lock().unwrap_or_else(PoisonError::into_inner);
            // The first one is why the later ones were called.
            raised.get_or_insert(error);
        });
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Progress {
    type Error = PyErr;

    fn extract(function: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let count = Count { done: 0, total: 0, called: Instant::now() };
        Ok(Self(Arc::new(Shared {
            function: function.to_owned().unbind(),
            count: Mutex::new(count),
            raised: Mutex::new(None),
        })))
    }
}

impl JobProgress for Progress {
    fn start(&self, total_bytes: u64) {
        let mut count = self.0.count.lock().unwrap_or_else(PoisonError::into_inner);
        *count = Count { done: 0, total: total_bytes, called: Instant::now() };
        drop(count);
        self.call(0, total_bytes);
    }

    fn advance(&self, bytes: u64) {
        let mut count = self.0.count.lock().unwrap_or_else(PoisonError::into_inner);
        count.done += bytes;
        if count.done < count.total && count.called.elapsed() < Self::INTERVAL {
            return;
        }
        count.called = Instant::now();
        let (done, total) = (count.done, count.total);
        // The function may wait for another thread of Python, which may be in here.
        drop(count);
        self.call(done, total);
    }
}
