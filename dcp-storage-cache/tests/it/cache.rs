//! What the cache adds to the storage below it.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dcp_conformance::MemoryStorage;
use dcp_core::storage::{PutMode, ReadInto, ReadRequest, StorageExt};
use dcp_core::{Buffer, Key, Storage, StorageErrorKind};
use dcp_storage_cache::{CacheFolder, CacheFolderBuilder, CachedStorage};
use dcp_testing::block_on;
use proptest::prelude::*;

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| seed.wrapping_add((at % 251) as u8)).collect()
}

fn put(storage: &dyn Storage, name: &str, bytes: Vec<u8>) {
    block_on(storage.put(&key(name), bytes.into(), PutMode::Overwrite)).unwrap();
}

fn cached(inner: &MemoryStorage, folder: CacheFolderBuilder) -> CachedStorage {
    let folder = folder.block_bytes(100).open().unwrap();
    CachedStorage::new(Arc::new(inner.clone()), "memory://bucket", folder)
}

fn read_all(storage: &CachedStorage, name: &str, len: u64) -> Vec<u8> {
    block_on(storage.read_range(&key(name), 0..len)).unwrap().to_vec()
}

fn blocks(folder: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(folder.join("blocks")).unwrap();
    let files = folders.flat_map(|folder| fs::read_dir(folder.unwrap().path()).unwrap());
    files.map(|file| file.unwrap().path()).collect()
}

#[test]
fn processes_of_a_node_fetch_each_byte_once() {
    let folder = tempfile::tempdir().unwrap();
    let inner = MemoryStorage::default();
    put(&inner, "a", bytes(3, 1050));
    // Locks belong to open files, so folders that are opened separately act like processes.
    let fetched = std::thread::scope(|scope| {
        let ranks = [0; 4].map(|_| {
            let storage = cached(&inner, CacheFolder::new(folder.path()));
            scope.spawn(move || {
                assert_eq!(read_all(&storage, "a", 1050), bytes(3, 1050));
                storage.stats()
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    assert_eq!(fetched.iter().map(|stats| stats.from_storage).sum::<u64>(), 1050);
    assert_eq!(fetched.iter().map(|stats| stats.from_cache).sum::<u64>(), 3 * 1050);
}

#[test]
fn a_replaced_object_is_read_anew() {
    let folder = tempfile::tempdir().unwrap();
    let inner = MemoryStorage::default();
    let storage = cached(&inner, CacheFolder::new(folder.path()));
    put(&inner, "a", bytes(1, 250));
    assert_eq!(read_all(&storage, "a", 250), bytes(1, 250));
    let old = block_on(storage.stat(&key("a"))).unwrap().version;
    put(&inner, "a", bytes(2, 250));
    assert_eq!(read_all(&storage, "a", 250), bytes(2, 250));

    // The old version is not served even though its blocks are still there.
    let request = |buffer| {
        let read = ReadInto { byte_offset: 0, buffer };
        ReadRequest::new(vec![read]).with_if_version(old.clone())
    };
    let error = block_on(storage.read(&key("a"), request(Buffer::zeroed(10)))).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Changed);
}

#[test]
fn a_damaged_or_cut_block_is_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let inner = MemoryStorage::default();
    put(&inner, "a", bytes(9, 100));
    for damage in [|file: &mut Vec<u8>| file[50] ^= 1, |file: &mut Vec<u8>| file.truncate(50)] {
        let storage = cached(&inner, CacheFolder::new(folder.path()));
        read_all(&storage, "a", 100);
        let block = blocks(folder.path()).pop().unwrap();
        let mut file = fs::read(&block).unwrap();
        damage(&mut file);
        fs::write(&block, file).unwrap();
        let again = cached(&inner, CacheFolder::new(folder.path()));
        assert_eq!(read_all(&again, "a", 100), bytes(9, 100));
        assert_eq!((again.stats().from_cache, again.stats().from_storage), (0, 100));
        assert_eq!(read_all(&again, "a", 100), bytes(9, 100));
        assert_eq!(again.stats().from_cache, 100);
    }
}

#[test]
fn the_folder_stays_below_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    let inner = MemoryStorage::default();
    let storage = cached(&inner, CacheFolder::new(folder.path()).max_bytes(3200));
    for number in 0..100 {
        let name = format!("{number}");
        put(&inner, &name, bytes(number, 100));
        assert_eq!(read_all(&storage, &name, 100), bytes(number, 100));
        let files = blocks(folder.path());
        let used: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
        assert!(used <= 3200 + 2 * 120, "{used} bytes after {number} blocks");
        // The clock of a file system may stand still for several blocks, so each is made older than
        // the next.
        for file in files {
            let file = File::options().write(true).open(file).unwrap();
            let used = file.metadata().unwrap().modified().unwrap();
            file.set_modified(used - Duration::from_secs(60)).unwrap();
        }
    }
    // The last one was used last.
    let before = storage.stats().from_storage;
    read_all(&storage, "99", 100);
    assert_eq!(storage.stats().from_storage, before);
}

#[test]
fn a_folder_that_others_can_write_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let error = CacheFolder::new(folder.path()).open().unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Denied);
    assert!(error.to_string().contains("chmod go-w"), "{error}");
}

#[test]
fn without_a_place_for_blocks_reads_go_to_the_storage() {
    let folder = tempfile::tempdir().unwrap();
    let inner = MemoryStorage::default();
    let storage = cached(&inner, CacheFolder::new(folder.path()));
    fs::remove_dir(folder.path().join("new")).unwrap();
    put(&inner, "a", bytes(4, 300));
    for round in 1..3 {
        assert_eq!(read_all(&storage, "a", 300), bytes(4, 300));
        assert_eq!(storage.stats().from_storage, 300 * round);
    }
}

#[test]
fn a_prefetched_object_is_not_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let inner = MemoryStorage::default();
    let storage = cached(&inner, CacheFolder::new(folder.path()));
    put(&inner, "a", bytes(4, 330));
    block_on(storage.prefetch(&key("a"))).unwrap();
    assert_eq!(storage.stats().from_storage, 330);
    assert_eq!(read_all(&storage, "a", 330), bytes(4, 330));
    assert_eq!(storage.stats().from_storage, 330);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_ranges_have_the_bytes_of_the_object(
        len in 0_usize..500,
        ranges in prop::collection::vec((0_usize..520, 0_usize..300), 0..6),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let inner = MemoryStorage::default();
        let object = bytes(7, len);
        put(&inner, "a", object.clone());
        let storage = cached(&inner, CacheFolder::new(folder.path()));
        for _ in 0..2 {
            let reads = ranges.iter().map(|(offset, len)| ReadInto {
                byte_offset: *offset as u64,
                buffer: Buffer::zeroed(*len),
            });
            let outcome = block_on(storage.read(&key("a"), ReadRequest::new(reads.collect())));
            let fits = ranges.iter().all(|(at, count)| *count == 0 || at + count <= len);
            prop_assert_eq!(outcome.is_ok(), fits);
            let buffers = outcome.map(|outcome| outcome.buffers).unwrap_or_default();
            for ((at, count), buffer) in ranges.iter().zip(buffers) {
                let expected = if *count == 0 { &[] } else { &object[*at..at + count] };
                prop_assert_eq!(&buffer[..], expected);
            }
        }
    }
}
