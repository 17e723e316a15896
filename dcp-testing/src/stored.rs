//! Objects in a storage, by their names as text.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{Key, Storage};
use futures_util::StreamExt as _;

use crate::block_on;

/// The key of a name.
///
/// # Panics
///
/// When it is none.
#[track_caller]
#[must_use]
pub fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// An empty storage.
#[must_use]
pub fn memory() -> Arc<dyn Storage> {
    Arc::new(MemoryStorage::new())
}

/// A storage of the files below a folder, by their paths in it.
#[track_caller]
#[must_use]
pub fn in_memory(folder: &Path) -> Arc<MemoryStorage> {
    let storage = MemoryStorage::new();
    put_folder(&storage, folder, "");
    Arc::new(storage)
}

/// Writes the files below a folder, with `prefix` before their paths in it.
#[track_caller]
pub fn put_folder(storage: &dyn Storage, folder: &Path, prefix: &str) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{prefix}{}", entry.file_name().into_string().unwrap());
        if entry.path().is_dir() {
            put_folder(storage, &entry.path(), &format!("{name}/"));
        } else {
            put(storage, &name, std::fs::read(entry.path()).unwrap());
        }
    }
}

/// Writes an object, over what has its name.
#[track_caller]
pub fn put(storage: &dyn Storage, name: &str, bytes: Vec<u8>) {
    block_on(storage.put(&key(name), bytes.into(), PutMode::Overwrite)).unwrap();
}

/// The bytes of an object.
///
/// # Panics
///
/// When there is none of this name.
#[track_caller]
#[must_use]
pub fn get(storage: &dyn Storage, name: &str) -> Bytes {
    block_on(storage.read_all(&key(name))).unwrap()
}

/// The names of all objects, sorted.
#[track_caller]
#[must_use]
pub fn names(storage: &dyn Storage) -> Vec<String> {
    let all = block_on(storage.list(None).collect::<Vec<_>>());
    let mut names: Vec<_> = all.into_iter().map(|meta| meta.unwrap().key.to_string()).collect();
    names.sort();
    names
}
