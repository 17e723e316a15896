//! Threads that may block.
//!
//! A request that is a system call blocks a thread, so in a runtime a storage makes it on another one. Two
//! hand-overs then take longer than reading a megabyte from memory, and its bytes are in the cache of
//! another core. A job that has a thread of its own runs everything there.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::error::CheckpointError;

thread_local! {
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` on this thread, on which nothing else waits to run: storages with
/// [`blocking`](super::Capabilities::blocking) requests make them here.
///
/// ```
/// use dcp_core::storage::{is_own_thread, on_own_thread};
///
/// assert!(on_own_thread(is_own_thread));
/// assert!(!is_own_thread());
/// ```
pub fn on_own_thread<T>(work: impl FnOnce() -> T) -> T {
    /// Ends with the work, also when that panics.
    struct Before(bool);

    impl Drop for Before {
        fn drop(&mut self) {
            IS_OWN.set(self.0);
        }
    }

    let _before = Before(IS_OWN.replace(true));
    work()
}

/// Whether requests may block this thread: it is within [`on_own_thread`].
#[must_use]
pub fn is_own_thread() -> bool {
    IS_OWN.get()
}

/// The work of one thread of [`OwnThreads`].
pub type Lane = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The threads of a job on which a writer may run lanes, each [on its own](on_own_thread).
pub trait OwnThreads: fmt::Debug + Send + Sync {
    /// The most lanes of a file that make progress at once.
    fn count(&self) -> usize;

    /// Runs one lane, from `lane`, on each of `count` threads. Ends when all have ended; they go on if the
    /// future is dropped.
    ///
    /// # Errors
    ///
    /// When a lane panicked, or could not be started.
    fn run(
        &self,
        count: usize,
        lane: Arc<dyn Fn() -> Lane + Send + Sync>,
    ) -> Pin<Box<dyn Future<Output = Result<(), CheckpointError>> + Send>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_its_own_until_the_work_ends_in_any_way() {
        let failed = std::panic::catch_unwind(|| {
            on_own_thread(|| {
                assert!(on_own_thread(is_own_thread));
                assert!(is_own_thread());
                panic!("on purpose");
            })
        });
        assert!(failed.is_err());
        assert!(!is_own_thread());
    }
}
