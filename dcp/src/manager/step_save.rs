//! The saves of steps.

use std::collections::BTreeMap;

use dcp_core::CheckpointError;
use dcp_core::text::without_secrets;
use dcp_engine::SaveHandle;

use super::{CheckpointManager, ManagerOperation, SavedStep};
use crate::checkpointer::Save;

/// The step that is saved, and where.
#[derive(Debug)]
pub(super) struct StepPlace {
    pub(super) step: u64,
    pub(super) url: String,
}

impl StepPlace {
    fn failed(&self, error: CheckpointError) -> CheckpointError {
        let url = without_secrets(&self.url).into_owned();
        CheckpointError::Step { step: self.step, url, source: Box::new(error) }
    }
}

/// A save of a step, from [`CheckpointManager::save`]; it runs when it is awaited, with
/// [`blocking`](Self::blocking), or with [`background`](Self::background).
#[derive(Debug)]
#[must_use = "a save does nothing until it is awaited"]
pub struct StepSave {
    manager: CheckpointManager,
    place: StepPlace,
    save: Save,
    metrics: BTreeMap<String, f64>,
}

impl StepSave {
    pub(super) fn new(manager: CheckpointManager, place: StepPlace, save: Save) -> Self {
        Self { manager, place, save, metrics: BTreeMap::new() }
    }

    /// Records a metric of the checkpoint, for [`KeepBest`](dcp_jobs::run::KeepBest). That of
    /// the coordinator counts.
    pub fn metric(mut self, name: impl Into<String>, value: f64) -> Self {
        self.metrics.insert(name.into(), value);
        self
    }

    /// Saves on this thread, without a runtime; see [`block_on`](crate::block_on).
    ///
    /// # Errors
    ///
    /// As [`Save::blocking`].
    #[cfg(feature = "blocking")]
    pub fn blocking(self) -> Result<SavedStep, CheckpointError> {
        crate::block_on(self.into_future())?
    }

    /// Copies the state, and saves the copy while training goes on; see [`Save::background`].
    /// [`PendingStep::wait`] records metrics and deletes. Where it is dropped instead, the step has no
    /// metrics, and the retention of the next save catches up.
    ///
    /// # Errors
    ///
    /// As [`Save::background`].
    pub fn background(self) -> Result<PendingStep, CheckpointError> {
        let Self { manager, place, save, metrics } = self;
        let handle = save.background().map_err(|error| place.failed(error))?;
        Ok(PendingStep { handle, manager, place, metrics })
    }
}

impl IntoFuture for StepSave {
    type Output = Result<SavedStep, CheckpointError>;
    type IntoFuture = std::pin::Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        let Self { manager, place, save, metrics } = self;
        Box::pin(async move {
            let saved = save.await.map_err(|error| place.failed(error))?;
            Ok(manager.committed(place.step, saved, metrics).await)
        })
    }
}

/// A save of a step that is under way, from [`StepSave::background`].
#[derive(Debug)]
#[must_use = "an error is only noticed by waiting"]
pub struct PendingStep {
    handle: SaveHandle,
    manager: CheckpointManager,
    place: StepPlace,
    metrics: BTreeMap<String, f64>,
}

impl PendingStep {
    /// The save: its stage, its progress, and a way to cancel it.
    #[must_use]
    pub fn handle(&self) -> &SaveHandle {
        &self.handle
    }

    /// Waits for the commit; then records metrics and deletes what the policy does not keep.
    ///
    /// # Errors
    ///
    /// As [`SaveHandle::wait`].
    pub fn wait(self) -> ManagerOperation<'static, SavedStep> {
        let Self { handle, manager, place, metrics } = self;
        ManagerOperation::new(async move {
            let saved = handle.wait().await.map_err(|error| place.failed(error))?;
            Ok(manager.committed(place.step, saved, metrics).await)
        })
    }
}
