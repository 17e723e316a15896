//! Every clause of `Storage`, on objects in memory.

#![expect(
    clippy::unwrap_used,
    reason = "panicking reports a storage that cannot be opened to the suite"
)]

use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::storage::trials;
use dcp_core::Storage;
use dcp_storage_object::ObjectStorage;
use object_store::memory::InMemory;

fn main() -> ExitCode {
    let open = || async {
        let storage = ObjectStorage::builder(Arc::new(InMemory::new())).build().unwrap();
        Arc::new(storage) as Arc<dyn Storage>
    };
    let mut all = trials("memory", open);
    // Many requests, of a few bytes each, below a prefix.
    let divided = || async {
        let storage = ObjectStorage::builder(Arc::new(InMemory::new()))
            .prefix("a folder/100%")
            .request_bytes(4096)
            .coalesce_gap(16)
            .bytes_in_flight(40_000)
            .parallelism(3)
            .build()
            .unwrap();
        Arc::new(storage) as Arc<dyn Storage>
    };
    all.extend(trials("divided", divided));
    dcp_conformance::run(all)
}
