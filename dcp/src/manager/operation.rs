//! An operation that is awaited, or run without a runtime.

use std::fmt;
use std::future::IntoFuture;
use std::pin::Pin;

use dcp_core::CheckpointError;

type Work<'a, T> = Pin<Box<dyn Future<Output = Result<T, CheckpointError>> + Send + 'a>>;

/// An operation of a [`CheckpointManager`](super::CheckpointManager), which runs when it is awaited or
/// with [`blocking`](Self::blocking).
#[must_use = "an operation does nothing until it is awaited"]
pub struct ManagerOperation<'a, T>(Work<'a, T>);

impl<'a, T> ManagerOperation<'a, T> {
    pub(super) fn new(work: impl Future<Output = Result<T, CheckpointError>> + Send + 'a) -> Self {
        Self(Box::pin(work))
    }

    /// Runs it on this thread, without a runtime; see [`block_on`](crate::block_on).
    ///
    /// # Errors
    ///
    /// Those of the operation.
    #[cfg(feature = "blocking")]
    pub fn blocking(self) -> Result<T, CheckpointError> {
        crate::block_on(self.0)?
    }
}

impl<'a, T> IntoFuture for ManagerOperation<'a, T> {
    type Output = Result<T, CheckpointError>;
    type IntoFuture = Work<'a, T>;

    fn into_future(self) -> Self::IntoFuture {
        self.0
    }
}

impl<T> fmt::Debug for ManagerOperation<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagerOperation").finish_non_exhaustive()
    }
}
