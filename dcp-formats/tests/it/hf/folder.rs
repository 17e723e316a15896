//! Folders in memory and what is read from them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::{CheckpointError, Storage, StorageReader, Tensor};
use dcp_formats::hf::HfReader;
use dcp_formats::safetensors::{SHARDING, SafetensorsItem, ShardingInfo, encode_header};
use indexmap::IndexMap;

use crate::harness::{Source, block_on, key, put, whole_plan};

pub(crate) type Tensors = BTreeMap<String, Tensor>;

fn root() -> PathBuf {
    dcp_testing::fixture("hf")
}

/// A fixture of PyTorch's Hugging Face storage, with its sub-folders.
pub(crate) fn fixture(name: &str) -> Arc<MemoryStorage> {
    let storage = MemoryStorage::new();
    add(&storage, &root().join(name).join("ckpt"), "");
    Arc::new(storage)
}

fn add(storage: &MemoryStorage, folder: &Path, prefix: &str) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
        if path.is_dir() {
            add(storage, &path, &format!("{name}/"));
        } else {
            put(storage, &name, std::fs::read(path).unwrap());
        }
    }
}

/// What a fixture should hold.
pub(crate) fn expected(name: &str) -> Tensors {
    let storage = MemoryStorage::new();
    let file = root().join(name).join("expected.safetensors");
    put(&storage, "expected.safetensors", std::fs::read(file).unwrap());
    tensors(&HfReader::file(Arc::new(storage), key("expected.safetensors"))).unwrap()
}

/// All tensors, whole.
pub(crate) fn tensors(reader: &dyn StorageReader) -> Result<Tensors, CheckpointError> {
    block_on(async {
        let metadata = reader.metadata().await?;
        let (plan, sink) = whole_plan(&metadata);
        let report = reader.read(&metadata, &plan, Arc::clone(&sink) as _).await?;
        assert_eq!(sink.committed.lock().unwrap().len(), plan.items.len());
        let mut needed = 0;
        let mut found = Tensors::new();
        for ((fqn, _), tensor) in metadata.iter().zip(&sink.tensors) {
            let tensor = tensor.clone().unwrap();
            needed += tensor.to_vec().unwrap().len() as u64;
            found.insert(fqn.to_string(), tensor);
        }
        assert_eq!(report.bytes_needed, needed);
        Ok(found)
    })
}

pub(crate) fn same(a: &Tensors, b: &Tensors) -> bool {
    a.len() == b.len() && a.iter().all(|(fqn, t)| b.get(fqn).is_some_and(|other| t.same(other)))
}

/// A tensor, its bytes, and where it begins if it is a part.
pub(crate) type Stored<'a> = (SafetensorsItem, Vec<u8>, Option<&'a [u64]>);

/// Writes a file of tensors; those with offsets are parts.
pub(crate) fn file(storage: &dyn Storage, name: &str, tensors: &[Stored<'_>]) {
    let mut sharding = ShardingInfo::default();
    for (item, _, offsets) in tensors {
        if let Some(offsets) = offsets {
            sharding.insert(Arc::clone(&item.name), (*offsets).into());
        }
    }
    let mut metadata = IndexMap::from([("format".to_owned(), "pt".to_owned())]);
    if !sharding.is_empty() {
        metadata.insert(SHARDING.to_owned(), sharding.to_json());
    }
    let items: Vec<_> = tensors.iter().map(|(item, ..)| item.clone()).collect();
    let encoded = encode_header(&items, &metadata).unwrap();
    let mut bytes = encoded.bytes.to_vec();
    for index in encoded.order {
        bytes.extend_from_slice(&tensors[index].1);
    }
    put(storage, name, bytes);
}

/// A `UInt8` tensor of `shape` whose bytes count from `first`.
pub(crate) fn counting(name: &str, shape: &[u64], first: u8) -> (SafetensorsItem, Vec<u8>) {
    let dtype = dcp_core::DType::UInt8;
    let item = SafetensorsItem { name: name.into(), dtype, shape: shape.into() };
    let len = shape.iter().product::<u64>() as u8;
    (item, (0..len).map(|n| first.wrapping_add(n)).collect())
}

/// What a write takes from.
pub(crate) fn data(items: Vec<Vec<u8>>) -> Arc<Source> {
    Arc::new(Source { items: items.into_iter().map(Into::into).collect(), segment: 100 })
}
