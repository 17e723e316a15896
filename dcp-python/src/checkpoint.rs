//! An opened checkpoint: its keys and its values. The jobs on it are in `jobs`.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp::core::metadata::Entry;
use dcp::core::path::{PathItem, StatePath};
use dcp::engine::Loader;
use dcp::jobs::read::read_object;
use dcp::{CheckpointError, StateDict};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::call;
use crate::failure::Failure;
use crate::log;
use crate::state::{Described, Extent, tensor};
use crate::storages::storages_with;
use crate::value::{encoded, text, to_python};

/// A checkpoint of any format. `distcp.Checkpoint` is the class that programs see.
#[pyclass(module = "distcp._native", frozen)]
pub(crate) struct Checkpoint {
    pub(crate) inner: dcp::Checkpoint,
    metadata: Arc<dcp::core::CheckpointMetadata>,
}

/// An entry of the index: name, dtype and shape of a tensor, and its path in the nested state.
type Row<'py> = (String, Option<(&'static str, Vec<u64>)>, Option<Bound<'py, PyTuple>>);

/// Opens the checkpoint at `url`. `options` are settings of storages by name, as of `--storage-option`.
#[pyfunction]
#[pyo3(signature = (url, *, rank=None, variant=None, options=None))]
pub(crate) fn open(
    py: Python<'_>,
    url: &str,
    rank: Option<u32>,
    variant: Option<String>,
    options: Option<BTreeMap<String, String>>,
) -> Result<Checkpoint, Failure> {
    let opener = opener(options.as_ref()).rank(rank).variant(variant);
    let opened = async {
        let inner = opener.open(url).await?;
        let metadata = inner.source().metadata().await.map_err(dcp::jobs::Error::from)?;
        Ok::<_, dcp::jobs::Error>(Checkpoint { inner, metadata })
    };
    call::run(py, || opened)
}

/// An opener of every format and storage of this build, whose notes go to the logger of Python.
pub(crate) fn opener(options: Option<&BTreeMap<String, String>>) -> dcp::Opener {
    Python::attach(log::start);
    dcp::opener(storages_with(options)).on_note(log::note)
}

#[pymethods]
impl Checkpoint {
    /// The name of the format.
    #[getter]
    fn format(&self) -> &'static str {
        self.inner.format().name
    }

    /// The URL, without secrets.
    #[getter]
    fn uri(&self) -> &str {
        self.inner.uri()
    }

    /// The notes of opening it.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.inner.notes().to_vec()
    }

    /// The entries of the index, in its order.
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<Vec<Row<'py>>> {
        let rows = self.metadata.iter().map(|(fqn, entry)| {
            let tensor =
                entry.as_tensor().map(|tensor| (tensor.dtype.name(), tensor.shape.to_vec()));
            let path = entry.path().map(|path| path_of(py, path)).transpose()?;
            Ok((fqn.to_string(), tensor, path))
        });
        rows.collect()
    }

    /// The offsets and sizes of the chunks of a tensor.
    fn chunks(&self, fqn: &str) -> Result<Vec<Extent>, Failure> {
        let entry = self.metadata.get(fqn).and_then(Entry::as_tensor);
        let entry = entry
            .ok_or_else(|| Failure::Argument(format!("{fqn:?} is no tensor of the checkpoint")))?;
        Ok(entry
            .chunks
            .iter()
            .map(|chunk| (chunk.offsets.to_vec(), chunk.sizes.to_vec()))
            .collect())
    }

    /// Reads regions of tensors into memory of Python: each item is a name and a described tensor, whose parts are
    /// disjoint. A chunk that is read whole is compared with its checksum.
    fn read(&self, py: Python<'_>, items: Vec<(String, Described)>) -> Result<(), Failure> {
        let mut state = StateDict::new();
        for (fqn, described) in items {
            let tensor = tensor(described, &fqn)?;
            state.insert(text(&fqn), tensor);
        }
        let reader = &*self.inner.source().reader;
        call::run(py, || async {
            Loader::new().load(&mut state, reader).await?;
            Ok::<_, CheckpointError>(())
        })
    }

    /// The value of an object, as plain data or a `distcp.Opaque`.
    fn object<'py>(&self, py: Python<'py>, fqn: &str) -> Result<Bound<'py, PyAny>, Failure> {
        let value = call::run(py, || read_object(self.inner.source(), fqn))?;
        Ok(to_python(py, fqn, &value)?)
    }

    /// An object as `torch.save` encodes it, and whether it is plain data.
    fn encoded_object<'py>(
        &self,
        py: Python<'py>,
        fqn: &str,
    ) -> Result<(Bound<'py, PyBytes>, bool), Failure> {
        let value = call::run(py, || read_object(self.inner.source(), fqn))?;
        let bytes = encoded(fqn, &value)?;
        Ok((PyBytes::new(py, &bytes), crate::value::is_plain(&value)))
    }
}

/// A path as PyTorch's metadata has it: a tuple of strings and integers.
fn path_of<'py>(py: Python<'py>, path: &StatePath) -> PyResult<Bound<'py, PyTuple>> {
    let steps = path.iter().map(|step| match step {
        PathItem::Key(key) => Ok(key.into_pyobject(py)?.into_any()),
        PathItem::Index(index) => Ok(index.into_pyobject(py)?.into_any()),
    });
    PyTuple::new(py, steps.collect::<PyResult<Vec<_>>>()?)
}
