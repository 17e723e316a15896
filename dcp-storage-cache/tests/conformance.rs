//! Every clause of `Storage`, on the storages of a node.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_conformance::storage::trials;
use dcp_storage_cache::{CacheFolder, CachedStorage, ThrottledStorage, UploadSlots};

fn main() -> ExitCode {
    let folder = tempfile::tempdir().unwrap();
    let cache = CacheFolder::new(folder.path().join("cache")).block_bytes(1000).open().unwrap();
    let number = std::sync::atomic::AtomicU64::new(0);
    let open = move || {
        let number = number.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let inner = Arc::new(MemoryStorage::default().conditional_claims());
        let storage = CachedStorage::new(inner, format!("memory://{number}"), cache.clone());
        async move { Arc::new(storage) as _ }
    };
    let mut all = trials("cached", open);
    let slots = UploadSlots::open(folder.path().join("slots"), 1).unwrap();
    let open = move || {
        let storage = ThrottledStorage::new(Arc::new(MemoryStorage::default()), slots.clone());
        async move { Arc::new(storage) as _ }
    };
    all.extend(trials("throttled", open));
    dcp_conformance::run(all)
}
