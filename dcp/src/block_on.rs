//! Futures for callers without a runtime.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use dcp_core::error::StorageOp;
use dcp_core::{CheckpointError, StorageError};
use tokio::runtime::{Builder, Handle, Runtime};

/// Threads of the runtime that all blocking calls share. They drive sockets and timers; a future
/// itself runs on the thread of its caller.
const THREADS: usize = 2;

/// The runtime, and the process whose threads drive it.
static SHARED: Mutex<Option<(u32, Runtime)>> = Mutex::new(None);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future to its end, on this thread.
///
/// All calls share one tokio runtime with I/O and timers, on threads of its own, which lasts until
/// the process ends. A connection that a storage or a collective opens in one call is therefore
/// alive in the next one. A process that was forked off has none of those threads, and gets a runtime of its own; what it
/// inherited of storages and groups is of its parent's runtime, and it opens its own.
///
/// It works on threads of another tokio runtime, too. There it holds up the thread, so prefer
/// `.await`, or call it within `tokio::task::spawn_blocking`.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let url = folder.path().join("step_1").display().to_string();
/// # dcp::save(&dcp::StateDict::new(), &url).blocking()?;
/// use dcp::core::registry::Access;
///
/// let storage = dcp::block_on(dcp::default_storages().open(&url, Access::Read))??;
/// let metadata = dcp::core::Key::new(".metadata")?;
/// assert!(dcp::block_on(storage.stat(&metadata))??.byte_len > 0);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// When the threads of the runtime cannot be started.
pub fn block_on<F: Future>(future: F) -> Result<F::Output, CheckpointError> {
    let handle = handle()?;
    let _entered = handle.enter();
    // Within a task of another runtime, the task's budget would run out and never be renewed.
    let mut future = pin!(tokio::task::unconstrained(future));
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return Ok(output),
            Poll::Pending => thread::park(),
        }
    }
}

fn handle() -> Result<Handle, CheckpointError> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((_, runtime)) = shared.as_ref().filter(|(of, _)| *of == process) {
        return Ok(runtime.handle().clone());
    }
    // The threads of one that was inherited are the parent's, and a drop would wait for them.
    std::mem::forget(shared.take());
    let runtime = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("dcp-blocking")
        .enable_all()
        .build()
        .map_err(|error| StorageError::from_io(StorageOp::Open, None, error))?;
    let handle = runtime.handle().clone();
    *shared = Some((process, runtime));
    Ok(handle)
}
