//! Fixtures and storages for the tests.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::storage::StorageExt as _;
use dcp_core::{Key, Storage};
pub(crate) use dcp_testing::{block_on, in_memory, names, put};
use serde_json::Value as Json;

/// The folder of a fixture.
pub(crate) fn fixture(name: &str) -> PathBuf {
    dcp_testing::fixture("megatron").join(name)
}

pub(crate) fn get(storage: &dyn Storage, name: &str) -> Option<Vec<u8>> {
    block_on(storage.read_all(&Key::new(name).unwrap())).ok().map(|bytes| bytes.to_vec())
}

pub(crate) fn remove(storage: &dyn Storage, name: &str) {
    block_on(storage.delete(&[Key::new(name).unwrap()])).unwrap();
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
