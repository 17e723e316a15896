//! The native module of the Python package `distcp`.
//!
//! Python code gives names, shapes and tensors; this crate makes values of dcp of them and calls the facade.
//! What touches a byte of a checkpoint is Rust, and runs without the GIL.
//!
//! | module | what |
//! |---|---|
//! | `memory` | the memory of Python's tensors as host memory: the one module with unsafe code |
//! | `value` | Python's plain data as values, and back |
//! | `state`, `stateful` | state dicts: nested values with tensors in Python's memory |
//! | `group` | a process group of PyTorch as a collective |
//! | `call`, `progress` | calls that release the GIL and end at Ctrl-C, and say how far they are |
//! | `failure`, `terms`, `log` | errors as exceptions, in the names of Python; traces as records of `logging` |
//! | `checkpoint`, `jobs` | an opened checkpoint: its keys, its values, the jobs on it |
//! | `checkpointer` | saves and loads of a group, also in the background |
//! | `manager` | the checkpoints of a training run |
//! | `planned` | a save that PyTorch's planner has planned |
//! | `storages`, `python_storage` | the storages of URLs, and one that an object of Python serves |
//! | `command` | the `dcp` command |

mod call;
mod checkpoint;
mod checkpointer;
mod command;
mod failure;
mod group;
mod jobs;
mod log;
mod manager;
mod memory;
mod planned;
mod progress;
mod python_storage;
mod state;
mod stateful;
mod storages;
mod terms;
mod value;

use pyo3::prelude::*;

// Its classes do not change but behind locks, so an interpreter without a GIL needs none for it.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<checkpoint::Checkpoint>()?;
    module.add_class::<checkpointer::Checkpointer>()?;
    module.add_class::<checkpointer::PendingSave>()?;
    module.add_class::<manager::Manager>()?;
    module.add_class::<manager::PendingStepSave>()?;
    module.add_class::<planned::PlannedSave>()?;
    module.add_function(wrap_pyfunction!(checkpoint::open, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::list_run, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::copy, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::merge, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::average, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::prune, module)?)?;
    module.add_function(wrap_pyfunction!(jobs::trace, module)?)?;
    module.add_function(wrap_pyfunction!(storages::register_storage, module)?)?;
    module.add_function(wrap_pyfunction!(command::run_command, module)?)?;
    Ok(())
}
