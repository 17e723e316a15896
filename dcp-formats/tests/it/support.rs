//! The fixtures: checkpoints that PyTorch wrote, and what they hold.

#![allow(dead_code, unreachable_pub, reason = "each test uses some of it")]
#![allow(clippy::unwrap_used, reason = "test code, though outside of test functions")]

pub mod tagged;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde_json::Value as Json;

/// A blob of a fixture, by its `expected_metadata.json`.
pub struct Item {
    pub fixture: String,
    pub fqn: String,
    pub offset: Option<Vec<u64>>,
    pub blob: Bytes,
    /// What the metadata says of a tensor; `None` for objects.
    pub tensor: Option<Json>,
    /// The sizes of this chunk.
    pub sizes: Vec<u64>,
}

pub fn root() -> PathBuf {
    dcp_testing::fixture("pytorch")
}

/// Names of all fixtures that hold a checkpoint.
pub fn names() -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !metadata_files(name).is_empty())
        .collect();
    names.sort();
    assert!(names.len() > 30, "fixtures are missing");
    names
}

/// Metadata files of a fixture with the JSON of what they hold.
pub fn metadata_files(name: &str) -> Vec<(PathBuf, PathBuf)> {
    let dir = root().join(name);
    let mut pairs = vec![(dir.join(".metadata"), dir.join("expected_metadata.json"))];
    for rank in 0..4 {
        let json = dir.join(format!("expected_metadata_{rank}.json"));
        pairs.push((dir.join(format!("__{rank}.metadata")), json));
    }
    pairs.retain(|(file, _)| file.exists());
    pairs
}

pub fn json(path: &Path) -> Json {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub fn uints(json: &Json) -> Vec<u64> {
    json.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

/// Every blob of a fixture that is stored untransformed.
pub fn items(name: &str) -> Vec<Item> {
    let mut items = Vec::new();
    for (_, expected) in metadata_files(name) {
        let metadata = json(&expected);
        let entries: BTreeMap<&str, &Json> = metadata["state_dict_metadata"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| (entry[0].as_str().unwrap(), &entry[1]))
            .collect();
        for entry in metadata["storage_data"].as_array().unwrap() {
            let (index, place) = (&entry[0], &entry[1]);
            if place.get("transform_descriptors").is_some_and(|t| !t.is_null()) {
                continue;
            }
            let file = root().join(name).join(place["relative_path"].as_str().unwrap());
            let start = place["offset"].as_u64().unwrap() as usize;
            let len = place["length"].as_u64().unwrap() as usize;
            let bytes = fs::read(file).unwrap();
            let fqn = index["fqn"].as_str().unwrap();
            let entry = entries[fqn];
            let offset = index["offset"].as_array().map(|_| uints(&index["offset"]));
            let chunks = entry["chunks"].as_array().cloned().unwrap_or_default();
            let sizes = chunks
                .iter()
                .find(|chunk| Some(uints(&chunk[0])) == offset)
                .map(|chunk| uints(&chunk[1]))
                .unwrap_or_default();
            items.push(Item {
                fixture: name.into(),
                fqn: fqn.into(),
                offset,
                blob: Bytes::from(bytes).slice(start..start + len),
                tensor: (entry["kind"] == "tensor").then(|| entry.clone()),
                sizes,
            });
        }
    }
    items
}

/// Tensors by FQN: shape and bytes, as safetensors has them.
pub fn expected_tensors(name: &str) -> BTreeMap<String, (Vec<u64>, Vec<u8>)> {
    tensors_of(&root().join(name).join("expected.safetensors"))
}

/// The tensors of a safetensors file by name: shape and bytes.
pub fn tensors_of(file: &Path) -> BTreeMap<String, (Vec<u64>, Vec<u8>)> {
    let bytes = fs::read(file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Json = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let data = &bytes[8 + header_len..];
    header
        .as_object()
        .unwrap()
        .iter()
        .filter(|(fqn, _)| *fqn != "__metadata__")
        .map(|(fqn, entry)| {
            let range = uints(&entry["data_offsets"]);
            let bytes = data[range[0] as usize..range[1] as usize].to_vec();
            (fqn.clone(), (uints(&entry["shape"]), bytes))
        })
        .collect()
}
