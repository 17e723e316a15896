//! The checkpoints of one training run.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dcp::jobs::run::SaveSchedule;
use dcp::manager::{CheckpointManager, PendingStep, Preemption, SaveReason, SavedStep};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call;
use crate::checkpointer::{Checkpointer, summary_of};
use crate::failure::Failure;
use crate::jobs::{BestOf, policy};
use crate::state::write_back;
use crate::stateful::{Loaded, Taken};

/// Saves by a schedule, resumes from the newest checkpoint that loads, and deletes old ones.
#[pyclass(module = "distcp._native", frozen)]
pub(crate) struct Manager {
    inner: CheckpointManager,
}

#[pymethods]
impl Manager {
    #[new]
    #[pyo3(signature = (
        url, checkpointer, *, every_steps=None, every_seconds=None, keep_last=None, keep_every=None, keep_best=None,
        on_sigterm=false,
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "they are the keyword arguments of Python's class"
    )]
    fn new(
        url: &str,
        checkpointer: &Checkpointer,
        every_steps: Option<u64>,
        every_seconds: Option<f64>,
        keep_last: Option<usize>,
        keep_every: Option<u64>,
        keep_best: Option<BestOf>,
        on_sigterm: bool,
    ) -> Result<Self, Failure> {
        if every_steps == Some(0) || every_seconds == Some(0.0) {
            let problem = "a schedule of every 0 steps or seconds; leave it out, or give more";
            return Err(Failure::Argument(problem.to_owned()));
        }
        let mut schedule = SaveSchedule::new();
        if let Some(steps) = every_steps {
            schedule = schedule.every_steps(steps);
        }
        if let Some(seconds) = every_seconds {
            let time = Duration::try_from_secs_f64(seconds);
            schedule = schedule.every(time.map_err(|error| Failure::Argument(error.to_string()))?);
        }
        let mut inner = CheckpointManager::new(url)
            .checkpointer(checkpointer.inner().clone())
            .schedule(schedule);
        let policy = policy(keep_last, keep_every, keep_best)?;
        if !policy.is_empty() {
            inner = inner.keep(policy);
        }
        if on_sigterm {
            let preemption = Preemption::on_sigterm();
            inner =
                inner.preemption(preemption.map_err(|error| Failure::Argument(error.to_string()))?);
        }
        Ok(Self { inner })
    }

    /// Whether this step is saved, and why: `"step"`, `"time"` or `"preemption"`. All ranks get the same answer.
    fn should_save(&self, py: Python<'_>, step: u64) -> Result<Option<&'static str>, Failure> {
        let reason = call::run(py, || self.inner.should_save(step).into_future())?;
        Ok(reason.map(|reason| match reason {
            SaveReason::Preemption => "preemption",
            SaveReason::Time => "time",
            _ => "step",
        }))
    }

    /// Saves a step.
    fn save<'py>(
        &self,
        step: u64,
        state: &Bound<'py, PyAny>,
        describe: &Bound<'py, PyAny>,
        metrics: Vec<(String, f64)>,
    ) -> Result<Bound<'py, PyDict>, Failure> {
        let (py, state) = (state.py(), Taken::of(state, describe));
        let save = self.inner.save(step, &state);
        let save = metrics.into_iter().fold(save, |save, (name, value)| save.metric(name, value));
        let saved =
            call::run(py, || save.into_future()).map_err(|failure| state.explain(py, failure))?;
        Ok(saved_step(py, &saved)?)
    }

    /// Copies the state, and saves the copy on another thread.
    fn save_in_background(
        &self,
        step: u64,
        state: &Bound<'_, PyAny>,
        describe: &Bound<'_, PyAny>,
        metrics: Vec<(String, f64)>,
    ) -> Result<PendingStepSave, Failure> {
        let save = self.inner.save(step, &Taken::of(state, describe));
        let save = metrics.into_iter().fold(save, |save, (name, value)| save.metric(name, value));
        let pending = state.py().detach(|| save.background())?;
        Ok(PendingStepSave { pending: Mutex::new(Some(pending)) })
    }

    /// Loads the newest checkpoint that is whole, and returns its step; `None` where there is no checkpoint.
    fn resume(
        &self,
        state: &Bound<'_, PyAny>,
        describe: &Bound<'_, PyAny>,
        make: &Bound<'_, PyAny>,
    ) -> Result<Option<u64>, Failure> {
        let mut loaded = Loaded::of(state, describe);
        let resumed = call::run(state.py(), || self.inner.resume(&mut loaded).into_future());
        let resumed = resumed.map_err(|failure| loaded.into.explain(state.py(), failure))?;
        let Some(resumed) = resumed else { return Ok(None) };
        write_back(state, &loaded.state(), make)?;
        Ok(Some(resumed.step))
    }
}

/// A step that is being saved in the background.
#[pyclass(module = "distcp._native", frozen)]
pub(crate) struct PendingStepSave {
    pending: Mutex<Option<PendingStep>>,
}

#[pymethods]
impl PendingStepSave {
    /// Waits for the end; then records metrics and deletes what no rule keeps.
    fn wait<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>, Failure> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
        let pending = pending
            .ok_or_else(|| Failure::Argument("the save was waited for before".to_owned()))?;
        let saved = call::run(py, || pending.wait().into_future())?;
        Ok(saved_step(py, &saved)?)
    }
}

fn saved_step<'py>(py: Python<'py>, saved: &SavedStep) -> PyResult<Bound<'py, PyDict>> {
    let result = summary_of(py, &saved.save)?;
    result.set_item("step", saved.step)?;
    result.set_item("problem", saved.problem.as_ref().map(ToString::to_string))?;
    let deleted = saved.pruned.iter().flat_map(|pruned| pruned.deleted.iter().map(|one| one.step));
    result.set_item("deleted", deleted.collect::<Vec<_>>())?;
    Ok(result)
}
