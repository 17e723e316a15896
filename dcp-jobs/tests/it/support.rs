//! Fixtures in memory, and a runtime to wait on.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::storage::PutMode;
use dcp_core::{Key, Payload, Storage};
pub(crate) use dcp_testing::block_on;

/// A fixture's files, without what is expected of them.
pub(crate) fn fixture(name: &str) -> Arc<dyn Storage> {
    let folder = dcp_testing::fixture("pytorch").join(name);
    let storage = MemoryStorage::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let file = file.unwrap();
        let name = file.file_name().into_string().unwrap();
        if !name.starts_with("expected") {
            let payload = Payload::from(std::fs::read(file.path()).unwrap());
            let key = Key::new(name).unwrap();
            block_on(storage.put(&key, payload, PutMode::Create)).unwrap();
        }
    }
    Arc::new(storage)
}
