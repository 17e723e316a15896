//! Runs file work on the runtime's blocking threads.

use dcp_core::error::StorageOp;
use dcp_core::storage::is_own_thread;
use dcp_core::{Key, StorageError, StorageErrorKind};
use tokio::runtime::Handle;
use tokio::task::JoinError;

/// Runs `work` on a blocking thread of the current runtime; here where there is none, or where the
/// caller lets this thread block.
///
/// The future may be dropped; work that has begun continues, with everything it owns.
pub(crate) async fn blocking<T, F>(
    op: StorageOp,
    key: Option<&Key>,
    work: F,
) -> Result<T, StorageError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, StorageError> + Send + 'static,
{
    if is_own_thread() {
        return work();
    }
    match Handle::try_current() {
        Ok(runtime) => match runtime.spawn_blocking(work).await {
            Ok(outcome) => outcome,
            Err(error) => Err(lost(op, key, error)),
        },
        Err(_) => work(),
    }
}

/// The error of work that panicked, or that the runtime dropped at its shutdown.
pub(crate) fn lost(op: StorageOp, key: Option<&Key>, error: JoinError) -> StorageError {
    StorageError::new(StorageErrorKind::Other, op, key.cloned())
        .with_message("the thread that did the work panicked or was shut down")
        .with_source(error)
}
