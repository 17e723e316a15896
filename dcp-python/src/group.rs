//! A process group of PyTorch as a [`Collective`].
//!
//! Python has the calls of `torch.distributed` (`distcp/torch/_group.py`); this side gives them bytes. The engine calls
//! from a thread of its own, which holds the GIL only between the calls: PyTorch releases it while it waits.

use bytes::Bytes;
use dcp::core::error::CollectiveError;
use dcp::core::{Collective, Rank};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A group whose messages an object of Python passes.
#[derive(Debug)]
pub(crate) struct PythonGroup {
    rank: Rank,
    world_size: u32,
    object: Py<PyAny>,
}

impl PythonGroup {
    /// The group of an object with `rank`, `world_size`, `gather`, `scatter`, `broadcast`, `all_gather`, `barrier` and
    /// `abort`.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let rank = object.getattr("rank")?.extract()?;
        let world_size = object.getattr("world_size")?.extract()?;
        Ok(Self { rank, world_size, object: object.clone().unbind() })
    }

    fn call<T>(
        &self,
        op: &'static str,
        body: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T, CollectiveError> {
        Python::attach(|py| {
            body(self.object.bind(py)).map_err(|error| {
                let message = error.to_string();
                match error.is_instance_of::<PyRuntimeError>(py) {
                    // PyTorch does not say which rank it lost: the text may have its address.
                    true => CollectiveError::Unreachable { op, message },
                    false => CollectiveError::Aborted { rank: self.rank, reason: message },
                }
            })
        })
    }
}

fn bytes(object: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    Ok(Bytes::copy_from_slice(object.cast::<PyBytes>()?.as_bytes()))
}

fn all_bytes(object: &Bound<'_, PyAny>) -> PyResult<Vec<Bytes>> {
    object.try_iter()?.map(|one| bytes(&one?)).collect()
}

impl Collective for PythonGroup {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.call("gather", |group| {
            let all = group.call_method1("gather", (root, PyBytes::new(group.py(), &mine)))?;
            if all.is_none() { Ok(None) } else { all_bytes(&all).map(Some) }
        })
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.call("scatter", |group| {
            let py = group.py();
            let all =
                all.map(|all| all.iter().map(|one| PyBytes::new(py, one)).collect::<Vec<_>>());
            bytes(&group.call_method1("scatter", (root, all))?)
        })
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        self.call("broadcast", |group| {
            let mine = from_root.map(|mine| PyBytes::new(group.py(), &mine));
            bytes(&group.call_method1("broadcast", (root, mine))?)
        })
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.call("all_gather", |group| {
            all_bytes(&group.call_method1("all_gather", (PyBytes::new(group.py(), &mine),))?)
        })
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.call("barrier", |group| group.call_method0("barrier").map(|_| ()))
    }

    fn abort(&self, reason: &str) {
        // A group that is gone already has no other rank.
        let _ = self.call("abort", |group| group.call_method1("abort", (reason,)).map(|_| ()));
    }
}
