//! Reading all of a file.

use std::path::PathBuf;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::{CheckpointError, CheckpointMetadata, Storage, StorageReader as _};
use dcp_formats::torch_save::TorchSaveReader;

use crate::harness::{Loaded, block_on, key, put, whole_plan};

/// The folder of the fixtures.
pub(crate) fn root() -> PathBuf {
    dcp_testing::fixture("torch_save")
}

/// A storage with one file of a fixture, `file.pt`.
pub(crate) fn fixture(name: &str, file: &str) -> Arc<MemoryStorage> {
    stored(std::fs::read(root().join(name).join(file)).unwrap())
}

/// A storage with the file `file.pt`.
pub(crate) fn stored(bytes: impl Into<Vec<u8>>) -> Arc<MemoryStorage> {
    let storage = MemoryStorage::new();
    put(&storage, "file.pt", bytes.into());
    Arc::new(storage)
}

pub(crate) fn reader(storage: &Arc<MemoryStorage>) -> TorchSaveReader {
    TorchSaveReader::new(Arc::clone(storage) as Arc<dyn Storage>, key("file.pt"))
}

pub(crate) fn metadata(
    storage: &Arc<MemoryStorage>,
) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
    block_on(reader(storage).metadata())
}

pub(crate) fn load(storage: &Arc<MemoryStorage>) -> Result<Loaded, CheckpointError> {
    let reader = reader(storage);
    block_on(async {
        let metadata = reader.metadata().await?;
        let (plan, sink) = whole_plan(&metadata);
        let report = reader.read(&metadata, &plan, Arc::clone(&sink) as _).await?;
        let mut loaded = Loaded { report, ..Loaded::default() };
        for (index, (fqn, _)) in metadata.iter().enumerate() {
            match &sink.tensors[index] {
                Some(tensor) => {
                    loaded.tensors.insert(fqn.to_string(), tensor.clone());
                }
                None => {
                    let value = sink.objects.lock().unwrap().remove(&(index as u32)).unwrap();
                    loaded.objects.insert(fqn.to_string(), value);
                }
            }
        }
        Ok(loaded)
    })
}
