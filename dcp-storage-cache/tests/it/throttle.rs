//! Turns of several processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dcp_conformance::MemoryStorage;
use dcp_core::storage::{PutMode, UploadOptions};
use dcp_core::{Key, Storage};
use dcp_storage_cache::{ThrottledStorage, UploadSlots};
use dcp_testing::block_on;

/// Locks belong to open files, so slots that are opened separately act like processes.
fn process(inner: &MemoryStorage, folder: &tempfile::TempDir, count: u32) -> ThrottledStorage {
    let slots = UploadSlots::open(folder.path().join("slots"), count).unwrap();
    ThrottledStorage::new(Arc::new(inner.clone()), slots)
}

#[test]
fn only_as_many_processes_upload_at_a_time_as_there_are_slots() {
    let folder = tempfile::tempdir().unwrap();
    let inner = MemoryStorage::default();
    let (active, most) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for rank in 0..6 {
            let storage = process(&inner, &folder, 2);
            let (active, most) = (&active, &most);
            scope.spawn(move || {
                for round in 0..20 {
                    let key = Key::new(format!("{rank}-{round}")).unwrap();
                    let options = UploadOptions::new(PutMode::Create, 4);
                    let mut upload = block_on(storage.start_upload(&key, options)).unwrap();
                    let now = active.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    std::thread::yield_now();
                    block_on(upload.put_part("part".into())).unwrap();
                    active.fetch_sub(1, Ordering::SeqCst);
                    block_on(upload.complete()).unwrap();
                }
            });
        }
    });
    assert!((1..=2).contains(&most.into_inner()));
    assert_eq!(dcp_testing::names(&inner).len(), 120);
}

#[test]
fn uploads_of_one_process_share_its_turn() {
    let folder = tempfile::tempdir().unwrap();
    let storage = process(&MemoryStorage::default(), &folder, 1);
    let start = |name: &str| {
        let options = UploadOptions::new(PutMode::Create, 4);
        block_on(storage.start_upload(&Key::new(name).unwrap(), options)).unwrap()
    };
    let (one, two) = (start("one"), start("two"));
    block_on(one.complete()).unwrap();
    block_on(two.abort()).unwrap();
}

#[test]
fn a_small_write_needs_no_turn() {
    let folder = tempfile::tempdir().unwrap();
    let inner = MemoryStorage::default();
    let [busy, other] = [(); 2].map(|()| process(&inner, &folder, 1));
    let options = UploadOptions::new(PutMode::Create, 4);
    let upload = block_on(busy.start_upload(&Key::new("large").unwrap(), options)).unwrap();
    let commit = Key::new("commit").unwrap();
    block_on(other.put(&commit, "index".into(), PutMode::Create)).unwrap();
    block_on(upload.abort()).unwrap();
}
