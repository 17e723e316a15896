//! A writer that is killed at any step leaves whole objects, and nothing else visible.
//!
//! The test program runs itself again, as a child that writes and kills itself before its n-th
//! change of the file system, for each n until a child comes through.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use dcp_core::storage::{PutMode, StorageExt, UploadOptions};
use dcp_core::{Key, Payload, Storage};
use futures_util::{FutureExt, TryStreamExt};
use rustix::process::{Signal, getpid, kill_process};

use crate::FsStorage;

const FOLDER: &str = "DCP_KILL_TEST_FOLDER";
const STEP: &str = "DCP_KILL_TEST_STEP";

/// Steps that a child still takes; 0 in a process that is not to die.
static LEFT: AtomicU64 = AtomicU64::new(0);

/// Counts a change of the file system, and ends a child whose turn it is.
pub(crate) fn step() {
    if LEFT.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)) == Ok(1) {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
}

/// An object whose bytes show whether it is whole: its seed, its length, and a pattern.
fn object(seed: u64, pieces: usize) -> Payload {
    let len = 1000 + seed * 7919;
    let body = (0..len).map(|i| (i ^ (seed * 31)) as u8).collect::<Vec<_>>();
    let bytes = Bytes::from([&seed.to_le_bytes()[..], &len.to_le_bytes(), &body].concat());
    let step = bytes.len().div_ceil(pieces);
    (0..bytes.len()).step_by(step).map(|at| bytes.slice(at..bytes.len().min(at + step))).collect()
}

fn is_whole(bytes: &Bytes) -> bool {
    let seed = bytes.first_chunk().map(|seed| u64::from_le_bytes(*seed));
    seed.is_some_and(|seed| seed < 1000 && object(seed, 1).to_bytes() == bytes)
}

/// Without a runtime the storage works on this thread, so its futures are ready at once.
fn now<T>(work: impl Future<Output = T>) -> T {
    work.now_or_never().unwrap()
}

fn write(folder: &Path) {
    let storage = FsStorage::open(folder).unwrap();
    let key = |name: &str| Key::new(name).unwrap();
    now(storage.put(&key("deep/er/put"), object(1, 3), PutMode::Create)).unwrap();
    now(storage.put(&key("many"), object(999, 1500), PutMode::Create)).unwrap();
    now(storage.put(&key("old"), object(2, 2), PutMode::Overwrite)).unwrap();
    for (name, mode) in [("deep/uploaded", PutMode::Create), ("older", PutMode::Overwrite)] {
        let mut upload =
            now(storage.start_upload(&key(name), UploadOptions::new(mode, 1 << 20))).unwrap();
        for piece in object(300, 3).pieces() {
            now(upload.put_part(piece.clone().into())).unwrap();
        }
        now(upload.complete()).unwrap();
    }
    now(storage.delete(&[key("old")])).unwrap();
}

/// Every file below `folder`, temporary ones included.
fn files(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { files(&path) } else { 1 }).sum()
}

/// Writes and dies in a child process; does nothing in the test itself.
#[test]
fn a_writer_that_dies() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    LEFT.store(std::env::var(STEP).unwrap().parse().unwrap(), Ordering::SeqCst);
    write(Path::new(&folder));
}

#[test]
fn after_a_death_at_any_step_every_visible_object_is_whole() {
    let (mut leftovers, mut seen) = (0, Vec::new());
    for step in 1.. {
        let folder = tempfile::tempdir().unwrap();
        let storage = FsStorage::open(folder.path()).unwrap();
        for name in ["old", "older"] {
            now(storage.put(&Key::new(name).unwrap(), object(7, 1), PutMode::Create)).unwrap();
        }
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kills::a_writer_that_dies"])
            .env(FOLDER, folder.path())
            .env(STEP, step.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        let listed = now(storage.list(None).try_collect::<Vec<_>>()).unwrap();
        for meta in &listed {
            let bytes = now(storage.read_all(&meta.key)).unwrap();
            assert!(
                is_whole(&bytes),
                "step {step}: {:?} is torn ({} bytes)",
                meta.key,
                bytes.len()
            );
        }
        leftovers += files(folder.path()) - listed.len();
        let mut names: Vec<_> = listed.iter().map(|meta| meta.key.as_str().to_owned()).collect();
        names.sort();
        if status.success() {
            assert_eq!(names, ["deep/er/put", "deep/uploaded", "many", "older"]);
            break;
        }
        // One object after the other becomes visible, and none disappears but the deleted one.
        if seen.last() != Some(&names) {
            seen.push(names);
        }
    }
    assert!(leftovers > 0, "no child died while it wrote");
    let counts: Vec<_> = seen.iter().map(Vec::len).collect();
    assert_eq!(counts, [2, 3, 4, 5, 4]);
}
