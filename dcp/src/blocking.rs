//! The same API for callers without a runtime.

use std::sync::Arc;

use dcp_core::{
    CheckpointError, StateDict, StorageError, StorageErrorKind, StorageOp, StorageReader,
    StorageWriter,
};
use dcp_engine::{LoadSummary, Loader, SaveSummary, Saver};

/// Saves `state` to `url`, as [`crate::save`] does.
///
/// # Errors
///
/// As [`crate::save`].
pub fn save(state: &StateDict, url: &str) -> Result<SaveSummary, CheckpointError> {
    run(crate::save(state, url))?
}

/// Loads `url` into `state`, as [`crate::load`] does.
///
/// # Errors
///
/// As [`crate::load`].
pub fn load(state: &mut StateDict, url: &str) -> Result<LoadSummary, CheckpointError> {
    run(crate::load(state, url))?
}

/// Saves with settings of one's own, as [`Saver::save`] does.
///
/// # Errors
///
/// As [`Saver::save`].
pub fn save_with(
    saver: &Saver,
    state: &StateDict,
    writer: &Arc<dyn StorageWriter>,
) -> Result<SaveSummary, CheckpointError> {
    run(saver.save(state, &**writer))?
}

/// Loads with settings of one's own, as [`Loader::load`] does.
///
/// # Errors
///
/// As [`Loader::load`].
pub fn load_with(
    loader: &Loader,
    state: &mut StateDict,
    reader: &Arc<dyn StorageReader>,
) -> Result<LoadSummary, CheckpointError> {
    run(loader.load(state, &**reader))?
}

/// Runs a future to its end on a runtime of its own, on this thread.
///
/// # Errors
///
/// When no runtime can be made.
pub fn run<F: Future>(future: F) -> Result<F::Output, CheckpointError> {
    if tokio::runtime::Handle::try_current().is_ok() {
        return Err(StorageError::new(StorageErrorKind::Unsupported, StorageOp::Open, None)
            .with_message("a blocking call inside an async runtime; use the async API there")
            .into());
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| StorageError::from_io(StorageOp::Open, None, error))?;
    Ok(runtime.block_on(future))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_blocking_call_inside_a_runtime_is_an_error_not_a_panic() {
        let inner = super::run(async { super::run(async {}) }).unwrap();
        assert!(inner.unwrap_err().to_string().contains("async API"));
    }
}
