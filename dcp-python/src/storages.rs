//! The storages of URLs: those of Rust, and those that Python code registers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use dcp::StorageRegistry;
use dcp::core::registry::StorageOptions;
use pyo3::prelude::*;

use crate::python_storage::PythonStorage;

/// Schemes, and the functions that open their URLs.
///
/// Calls lock this with and without the GIL. So nothing takes the GIL, and no object of Python is dropped, while a lock is
/// held: the one thread would wait for the GIL, the other with the GIL for the lock.
static REGISTERED: Mutex<Vec<(String, Arc<Py<PyAny>>)>> = Mutex::new(Vec::new());

/// The storages that calls share, and their process.
static SHARED: Mutex<Option<(u32, StorageRegistry)>> = Mutex::new(None);

/// Serves URLs of a scheme by the objects that `open` returns for them.
#[pyfunction]
pub(crate) fn register_storage(scheme: String, open: Py<PyAny>) {
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = registered.iter().position(|(known, _)| *known == scheme);
    let old = at.map(|at| registered.swap_remove(at));
    registered.push((scheme, Arc::new(open)));
    drop(registered);
    let shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner).take();
    drop((old, shared));
}

/// The storages of URLs, with the connections of earlier calls.
pub(crate) fn storages() -> StorageRegistry {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    // A process that was forked off has none of the threads that serve the connections of its parent.
    let process = std::process::id();
    if let Some((_, storages)) = shared.as_ref().filter(|(of, _)| *of == process) {
        return storages.clone();
    }
    let storages = new_storages();
    let old = shared.replace((process, storages.clone()));
    drop(shared);
    drop(old);
    storages
}

/// The storages of URLs with these settings, as of `dcp --storage-option`.
pub(crate) fn storages_with(options: Option<&BTreeMap<String, String>>) -> StorageRegistry {
    let Some(options) = options.filter(|options| !options.is_empty()) else { return storages() };
    let options =
        options.iter().fold(StorageOptions::new(), |all, (name, value)| all.with(name, value));
    new_storages().options(options)
}

fn new_storages() -> StorageRegistry {
    let mut storages = dcp::default_storages();
    let registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    for (scheme, open) in &*registered {
        let open = Arc::clone(open);
        storages.register(scheme.clone(), move |request| {
            Ok(Arc::new(PythonStorage::open(&open, &request.url)?))
        });
    }
    storages
}
