//! Fixtures and storages for the tests.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::{Key, ObjectMeta, PutMode, Storage, StorageExt as _};
use futures_util::StreamExt as _;

/// Runs a future to its end.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// The folder of a fixture.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/megatron").join(name)
}

/// A folder's files in memory, by their paths in it.
pub(crate) fn in_memory(folder: &Path) -> Arc<MemoryStorage> {
    fn fill(storage: &MemoryStorage, folder: &Path, prefix: &str) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().into_string().unwrap());
            if entry.file_type().unwrap().is_dir() {
                fill(storage, &entry.path(), &format!("{name}/"));
            } else {
                put(storage, &name, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    let storage = MemoryStorage::new();
    fill(&storage, folder, "");
    Arc::new(storage)
}

pub(crate) fn put(storage: &dyn Storage, name: &str, bytes: Vec<u8>) {
    let key = Key::new(name).unwrap();
    block_on(storage.put(&key, bytes.into(), PutMode::Overwrite)).unwrap();
}

pub(crate) fn get(storage: &dyn Storage, name: &str) -> Option<Vec<u8>> {
    block_on(storage.read_all(&Key::new(name).unwrap())).ok().map(|bytes| bytes.to_vec())
}

/// The names of all objects, sorted.
pub(crate) fn names(storage: &dyn Storage) -> Vec<String> {
    let found: Vec<ObjectMeta> =
        block_on(storage.list(None).map(|meta| meta.unwrap()).collect::<Vec<_>>());
    let mut names: Vec<_> = found.iter().map(|meta| meta.key.to_string()).collect();
    names.sort();
    names
}

/// The same objects in a storage of their own.
pub(crate) fn copy(storage: &dyn Storage) -> Arc<MemoryStorage> {
    let copy = MemoryStorage::new();
    for name in names(storage) {
        put(&copy, &name, get(storage, &name).unwrap());
    }
    Arc::new(copy)
}
