//! Handing file work to the runtime's blocking threads.

use tokio::runtime::Handle;

/// Runs `work` on a blocking thread of the current runtime, or here where there is none. `None` if
/// the runtime shuts down.
pub(crate) async fn blocking<T, F>(work: F) -> Option<T>
where
    T: Send + 'static,
    F: FnOnce() -> T + Send + 'static,
{
    match Handle::try_current() {
        Ok(runtime) => runtime.spawn_blocking(work).await.ok(),
        Err(_) => Some(work()),
    }
}
