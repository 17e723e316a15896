//! Saves and loads of a group, also in the background.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use dcp::core::Collective;
use dcp::engine::{SaveHandle, SaveSummary};
use dcp::formats::dcp::{DcpWriter, FileLayout};
use dcp::planner::FlattenRule;
use dcp::{LoadMode, Settings};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call;
use crate::failure::Failure;
use crate::group::PythonGroup;
use crate::log;
use crate::state::write_back;
use crate::stateful::{Loaded, Taken};
use crate::storages::storages;

/// A group of ranks that saves and loads.
#[pyclass(module = "distcp._native", frozen)]
pub(crate) struct Checkpointer {
    inner: dcp::Checkpointer,
}

#[pymethods]
impl Checkpointer {
    /// `group` is an object with the calls of a process group, or `None` for this process alone. `files` is the number
    /// of files for each rank.
    #[new]
    #[pyo3(signature = (*, group=None, files=None, overwrite=true, flatten=true, load_mode="strict"))]
    fn new(
        group: Option<&Bound<'_, PyAny>>,
        files: Option<usize>,
        overwrite: bool,
        flatten: bool,
        load_mode: &str,
    ) -> Result<Self, Failure> {
        Python::attach(log::start);
        let mut settings = Settings::new();
        if let Some(group) = &group {
            let group: Arc<dyn Collective> = Arc::new(PythonGroup::new(group)?);
            settings = Settings::in_group(group);
        }
        if !flatten {
            settings = settings.flatten_rule(FlattenRule::TopLevel);
        }
        let settings = settings.load_mode(mode_of(load_mode)?);
        let inner = dcp::Checkpointer::with_settings(settings).storages(storages());
        let layout = files
            .and_then(NonZeroUsize::new)
            .map_or_else(FileLayout::default, FileLayout::SplitBySize);
        let inner = inner.writer(move |storage| {
            DcpWriter::builder(storage).files(layout).overwrite(overwrite).build()
        });
        Ok(Self { inner })
    }

    /// Saves `state` to `url` and returns what was saved.
    fn save<'py>(
        &self,
        state: &Bound<'py, PyAny>,
        url: &str,
        describe: &Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyDict>, Failure> {
        let (py, state) = (state.py(), Taken::of(state, describe));
        let saving = self.inner.save(&state, url);
        let summary =
            call::run(py, || saving.into_future()).map_err(|failure| state.explain(py, failure))?;
        Ok(summary_of(py, &summary)?)
    }

    /// Copies `state` and saves the copy on another thread.
    fn save_in_background(
        &self,
        state: &Bound<'_, PyAny>,
        url: &str,
        describe: &Bound<'_, PyAny>,
    ) -> Result<PendingSave, Failure> {
        let (py, state) = (state.py(), Taken::of(state, describe));
        let saving = self.inner.save(&state, url);
        let handle = py.detach(|| saving.background())?;
        Ok(PendingSave { handle: Mutex::new(Some(handle)) })
    }

    /// Loads `url` into `state`. `mode` is `"exact"`, `"strict"`, `"allow_missing"` or `"partial"`.
    fn load(
        &self,
        state: &Bound<'_, PyAny>,
        url: &str,
        describe: &Bound<'_, PyAny>,
        make: &Bound<'_, PyAny>,
        mode: &str,
    ) -> Result<(), Failure> {
        let (py, mode) = (state.py(), mode_of(mode)?);
        let mut loaded = Loaded::of(state, describe);
        let done = call::run(py, || self.inner.load(&mut loaded, url).mode(mode).into_future());
        done.map_err(|failure| loaded.into.explain(py, failure))?;
        write_back(state, &loaded.state(), make)
    }
}

impl Checkpointer {
    pub(crate) fn inner(&self) -> &dcp::Checkpointer {
        &self.inner
    }
}

/// The load mode of that name.
pub(crate) fn mode_of(name: &str) -> Result<LoadMode, Failure> {
    match name {
        "exact" => Ok(LoadMode::Exact),
        "strict" => Ok(LoadMode::Strict),
        "allow_missing" => Ok(LoadMode::AllowMissing),
        "partial" => Ok(LoadMode::Partial),
        other => {
            let known = "exact, strict, allow_missing, partial";
            Err(Failure::Argument(format!("load mode {other:?} is none of {known}")))
        }
    }
}

/// A save that goes on in the background.
#[pyclass(module = "distcp._native", frozen)]
pub(crate) struct PendingSave {
    handle: Mutex<Option<SaveHandle>>,
}

#[pymethods]
impl PendingSave {
    /// Waits for the end and returns what was saved.
    fn wait<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>, Failure> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        let handle =
            handle.ok_or_else(|| Failure::Argument("the save was waited for before".to_owned()))?;
        let summary = call::run(py, || async move { handle.wait().await })?;
        Ok(summary_of(py, &summary)?)
    }
}

pub(crate) fn summary_of<'py>(
    py: Python<'py>,
    summary: &SaveSummary,
) -> PyResult<Bound<'py, PyDict>> {
    let result = PyDict::new(py);
    result.set_item("entries", summary.entries)?;
    result.set_item("bytes_written", summary.bytes_written)?;
    result.set_item("files", summary.files)?;
    result.set_item("reused_plan", summary.reused_plan)?;
    let differing = summary
        .differing
        .iter()
        .map(|one| (one.fqn.clone(), one.ranks.clone()))
        .collect::<Vec<_>>();
    result.set_item("differing", differing)?;
    Ok(result)
}
