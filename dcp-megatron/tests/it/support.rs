//! Fixtures and storages for the tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::{Key, ObjectMeta, PutMode, Storage, StorageExt as _};
use futures_util::StreamExt as _;
use serde_json::Value as Json;

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

pub(crate) fn remove(storage: &dyn Storage, name: &str) {
    block_on(storage.delete(&Key::new(name).unwrap())).unwrap();
}

/// The names of all objects, sorted.
pub(crate) fn names(storage: &dyn Storage) -> Vec<String> {
    let found: Vec<ObjectMeta> =
        block_on(storage.list(None).map(|meta| meta.unwrap()).collect::<Vec<_>>());
    let mut names: Vec<_> = found.iter().map(|meta| meta.key.to_string()).collect();
    names.sort();
    names
}

/// All objects, by their names.
pub(crate) fn objects(storage: &dyn Storage) -> BTreeMap<String, Vec<u8>> {
    let each = |name: String| (name.clone(), get(storage, &name).unwrap());
    names(storage).into_iter().map(each).collect()
}

/// The same objects in a storage of their own.
pub(crate) fn copy(storage: &dyn Storage) -> Arc<MemoryStorage> {
    let copy = MemoryStorage::new();
    for name in names(storage) {
        put(&copy, &name, get(storage, &name).unwrap());
    }
    Arc::new(copy)
}

/// The checkpoint of a fixture in memory, or the whole run where it is one.
pub(crate) fn stored(name: &str) -> Arc<dyn Storage> {
    let whole = fixture(name);
    let checkpoint = whole.join("ckpt");
    in_memory(if checkpoint.is_dir() { &checkpoint } else { &whole })
}

/// A fixture's `expected.json`.
pub(crate) fn expected_json(name: &str) -> Json {
    let text = std::fs::read(fixture(name).join("expected.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// Shapes and bytes by key.
pub(crate) type Tensors = BTreeMap<String, (Vec<u64>, Vec<u8>)>;

/// The tensors in a fixture's `expected.safetensors`.
pub(crate) fn expected_tensors(name: &str) -> Tensors {
    tensors_in(name, "expected.safetensors")
}

/// The same of another file of a fixture.
pub(crate) fn tensors_in(name: &str, file: &str) -> Tensors {
    let bytes = std::fs::read(fixture(name).join(file)).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Json = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let data = &bytes[8 + header_len..];
    let tensors = header.as_object().unwrap().iter().filter(|(fqn, _)| *fqn != "__metadata__");
    let tensors = tensors.map(|(fqn, entry)| {
        let range = uints(&entry["data_offsets"]);
        let bytes = data[range[0] as usize..range[1] as usize].to_vec();
        (fqn.clone(), (uints(&entry["shape"]), bytes))
    });
    tensors.collect()
}

pub(crate) fn uints(json: &Json) -> Vec<u64> {
    json.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}
