//! What is visible after a writer was killed: whole objects, and nothing else.
//!
//! The test runs itself again as a child that writes without end, and kills it at a random moment.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "this is a test")]

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_conformance::{Trial, run};
use dcp_core::{Key, Payload, PutMode, Storage, StorageErrorKind, StorageExt};
use dcp_storage_fs::FsStorage;
use futures_util::TryStreamExt;
use tokio::runtime::{Builder, Runtime};

const CHILD: &str = "DCP_CRASH_TEST_FOLDER";
const LIMITED_CHILD: &str = "DCP_LIMIT_TEST_FOLDER";

fn main() -> ExitCode {
    if let Some(folder) = std::env::var_os(CHILD) {
        write_without_end(Path::new(&folder));
    }
    if let Some(folder) = std::env::var_os(LIMITED_CHILD) {
        write_too_much(Path::new(&folder));
        return ExitCode::SUCCESS;
    }
    let trial = |name, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    run(vec![
        trial("a_write_beyond_the_limit_of_the_process_is_full", limit_writer),
        trial("after_a_kill_every_visible_object_is_whole", kill_writers),
        trial("leftovers_of_the_dead_are_removed_and_those_of_the_living_kept", clean_up),
    ])
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).build().unwrap()
}

/// An object that can be told whole from its bytes alone: its seed, its length, and a pattern.
fn object(seed: u64) -> Payload {
    let len = 1000 + seed.wrapping_mul(7919) % 400_000;
    let body = (0..len).map(|i| (i ^ seed.wrapping_mul(31)) as u8).collect::<Vec<_>>();
    let head = [seed.to_le_bytes(), len.to_le_bytes()].concat();
    let body = Bytes::from(body);
    let half = body.len() / 2;
    vec![head.into(), body.slice(..half), body.slice(half..)].into()
}

fn is_whole(bytes: &Bytes) -> bool {
    let seed = bytes.first_chunk().map(|seed| u64::from_le_bytes(*seed));
    seed.is_some_and(|seed| object(seed).to_bytes() == bytes)
}

fn write_without_end(folder: &Path) -> ! {
    let storage = FsStorage::builder(folder).sync(false).open().unwrap();
    let runtime = runtime();
    for number in 0.. {
        let seed = u64::from(std::process::id()) << 32 | number;
        runtime.block_on(async {
            let key = Key::new(format!("put/{seed}")).unwrap();
            storage.put(&key, object(seed), PutMode::Create).await.unwrap();
            let key = Key::new(format!("overwritten/{}", number % 3)).unwrap();
            storage.put(&key, object(seed), PutMode::Overwrite).await.unwrap();
            let key = Key::new(format!("uploaded/{seed}")).unwrap();
            let mut upload = storage.start_upload(&key, PutMode::Create).await.unwrap();
            for piece in object(seed).pieces() {
                upload.put_part(piece.clone().into()).await.unwrap();
            }
            upload.complete().await.unwrap();
        });
    }
    unreachable!("the loop has no end");
}

/// Every file below `folder`, temporary ones included.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files.extend(self::files(&path)) } else { files.push(path) }
    }
    files
}

fn kill_writers() {
    const KILLS: u64 = 25;
    let folder = tempfile::tempdir().unwrap();
    let storage = Arc::new(FsStorage::open(folder.path()).unwrap());
    let mut whole = 0;
    let mut leftovers = 0;
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(CHILD, folder.path())
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        while files(folder.path()).is_empty() && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(5_000 + kill * 1_733));
        assert!(child.try_wait().unwrap().is_none(), "the child failed");
        child.kill().unwrap();
        child.wait().unwrap();
        let objects = runtime().block_on(async {
            let listed = storage.list(None).try_collect::<Vec<_>>().await.unwrap();
            for meta in &listed {
                let bytes = storage.read_all(&meta.key).await.unwrap();
                assert!(is_whole(&bytes), "{:?} is torn ({} bytes)", meta.key, bytes.len());
            }
            listed.len()
        });
        whole += objects;
        leftovers += files(folder.path()).len() - objects;
        for file in files(folder.path()) {
            fs::remove_file(file).unwrap();
        }
    }
    assert!(whole > 0, "no child wrote anything");
    assert!(leftovers > 0, "no child was killed while it wrote; the test shows nothing");
}

/// Runs in a process that may not write files of more than 64 KiB.
fn write_too_much(folder: &Path) {
    let storage = FsStorage::open(folder).unwrap();
    let runtime = runtime();
    let key = Key::new("object").unwrap();
    let large = || Payload::from(vec![1; 300_000]);
    let error = runtime.block_on(storage.put(&key, large(), PutMode::Create)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Full, "{error}");
    let mut upload = runtime.block_on(storage.start_upload(&key, PutMode::Create)).unwrap();
    let error = runtime.block_on(upload.put_part(large())).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Full, "{error}");
    runtime.block_on(upload.complete()).unwrap_err();
    assert_eq!(files(folder).len(), 0, "a temporary file is left");
    runtime.block_on(storage.put(&key, "small".into(), PutMode::Create)).unwrap();
}

fn limit_writer() {
    let folder = tempfile::tempdir().unwrap();
    // The signal would kill the child; ignored, the write fails. Shells count in units of 512 or
    // 1024 bytes.
    let status = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$0\""])
        .arg(std::env::current_exe().unwrap())
        .env(LIMITED_CHILD, folder.path())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(files(folder.path()).len(), 1);
}

fn clean_up() {
    let folder = tempfile::tempdir().unwrap();
    let storage = FsStorage::open(folder.path()).unwrap();
    let clean = |age| runtime().block_on(storage.clean_leftovers(age)).unwrap();
    let old = Duration::ZERO;
    let key = |name: &str| Key::new(name).unwrap();

    // A leftover: one of a child that was killed while it wrote.
    let leftover = loop {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(CHILD, folder.path())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(40));
        child.kill().unwrap();
        child.wait().unwrap();
        let temp = files(folder.path())
            .into_iter()
            .find(|path| path.file_name().unwrap().as_encoded_bytes().starts_with(b".dcp-tmp."));
        if let Some(temp) = temp {
            break temp;
        }
    };
    let living = runtime();
    let mut upload =
        living.block_on(storage.start_upload(&key("put/mine"), PutMode::Create)).unwrap();
    living.block_on(upload.put_part("abc".into())).unwrap();
    let objects = runtime().block_on(storage.list(None).try_collect::<Vec<_>>()).unwrap();

    assert_eq!(clean(Duration::from_secs(3600)), 0, "it is too young");
    assert!(leftover.exists());
    assert!(clean(old) >= 1);
    assert!(!leftover.exists());
    assert_eq!(clean(old), 0, "the upload of this process is in progress");
    living.block_on(upload.complete()).unwrap();
    let after = runtime().block_on(storage.list(None).try_collect::<Vec<_>>()).unwrap();
    assert_eq!(after.len(), objects.len() + 1, "an object was taken for a leftover");

    // One of another machine goes by its age alone.
    let distant = folder.path().join(".dcp-tmp.0123456789abcdef.1.1.0");
    fs::write(&distant, "x").unwrap();
    assert_eq!(clean(Duration::from_secs(3600)), 0);
    assert_eq!(clean(old), 1);
    assert!(!distant.exists());
}
