//! What a process that was killed leaves, and what one that may not write much does.
//!
//! The test runs itself again as a child. What is visible after a death at any step is held by
//! `src/kills.rs`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "this is a test")]

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, SystemTime};

use dcp_conformance::{Trial, run};
use dcp_core::storage::{LeftoverAction, PutMode, UploadOptions};
use dcp_core::{Key, Payload, Storage, StorageErrorKind};
use dcp_storage_fs::FsStorage;
use dcp_storage_fs::disk_log::DiskLog;
use dcp_testing::{Crashes, Loss, OnDisk};
use futures_util::TryStreamExt;
use tokio::runtime::{Builder, Runtime};

const CHILD: &str = "DCP_CRASH_TEST_FOLDER";
const LIMITED_CHILD: &str = "DCP_LIMIT_TEST_FOLDER";

fn main() -> ExitCode {
    if let Some(folder) = std::env::var_os(CHILD) {
        write_and_wait(Path::new(&folder));
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
        trial(
            "what_a_write_made_durable_survives_any_crash",
            what_a_write_made_durable_survives_any_crash,
        ),
        trial("without_sync_a_crash_loses_what_was_written", lose),
        trial("a_disk_log_records_its_own_folder_alone", record_one_folder),
        trial("a_write_beyond_the_limit_of_the_process_is_full", limit_writer),
        trial("leftovers_of_the_dead_are_removed_and_those_of_the_living_kept", clean_up),
    ])
}

/// Writes objects in all ways, and returns their last bytes with the number of events after which
/// they are durable.
fn write_all(storage: &FsStorage, log: &DiskLog) -> Vec<(&'static str, &'static str, usize)> {
    let runtime = runtime();
    let key = |name: &str| Key::new(name).unwrap();
    let mut durable = Vec::new();
    let mut written = |name, bytes| durable.push((name, bytes, log.events().len()));
    for (name, bytes, mode) in [
        ("a", "first", PutMode::Create),
        ("deep/er/b", "first", PutMode::Create),
        ("a", "second one", PutMode::Overwrite),
    ] {
        runtime.block_on(storage.put(&key(name), bytes.into(), mode)).unwrap();
        written(name, bytes);
    }
    for (name, mode) in [("deep/c", PutMode::Create), ("a", PutMode::Overwrite)] {
        let options = UploadOptions::new(mode, 1 << 20);
        let mut upload = runtime.block_on(storage.start_upload(&key(name), options)).unwrap();
        runtime.block_on(upload.put_part("part".into())).unwrap();
        runtime.block_on(upload.complete()).unwrap();
        written(name, "part");
    }
    let claim = runtime.block_on(storage.claim(&key("claimed"))).unwrap();
    runtime.block_on(claim.replace("by claim".into())).unwrap();
    drop(claim);
    written("claimed", "by claim");
    runtime.block_on(storage.delete(&[key("deep/c")])).unwrap();
    written("deep/c", "");
    durable
}

/// The crashes after which an object is not what a write that returned before made it, or torn.
fn losses(sync: bool) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let log = DiskLog::start(folder.path()).unwrap();
    let storage = FsStorage::builder(folder.path()).sync(sync).open().unwrap();
    let durable = write_all(&storage, &log);
    let crashes = Crashes::of(&log);
    let mut lost = Vec::new();
    for point in 0..crashes.points() {
        for loss in Loss::all(20) {
            let disk = crashes.disk(point, loss);
            for name in ["a", "deep/er/b", "deep/c", "claimed"] {
                let found = match disk.get(Path::new(name)) {
                    Some(OnDisk::File { bytes, .. }) => Some(bytes.clone()),
                    _ => None,
                };
                let versions: Vec<_> = durable.iter().filter(|one| one.0 == name).collect();
                let last = versions.iter().rposition(|one| one.2 <= point);
                // The last durable version, or a later one.
                let is_one = |(_, bytes, _): &&&(_, &str, _)| {
                    found.as_deref() == (!bytes.is_empty()).then_some(bytes.as_bytes())
                };
                let found_one = versions.iter().skip(last.unwrap_or(0)).any(|one| is_one(&one));
                if !found_one && (last.is_some() || found.is_some()) {
                    let event = crashes.event(point);
                    lost.push(format!("{name} is {found:?} before {event}, {loss:?}"));
                }
            }
        }
    }
    assert!(crashes.points() > 20, "{} points", crashes.points());
    lost
}

fn what_a_write_made_durable_survives_any_crash() {
    let lost = losses(true);
    assert!(lost.is_empty(), "{lost:#?}");
}

/// Each model of loss shows it.
fn lose() {
    let lost = losses(false);
    for loss in ["Unsynced", "Bytes", "Zeros", "Additions", "Removals", "Some"] {
        assert!(lost.iter().any(|one| one.contains(loss)), "{loss} loses nothing");
    }
    assert!(!lost.iter().any(|one| one.ends_with("Nothing")), "{lost:#?}");
}

/// The file system may give an inode of the recorded folder to a file of another one.
fn record_one_folder() {
    let [folder, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let log = DiskLog::start(folder.path()).unwrap();
    let storage = FsStorage::open(folder.path()).unwrap();
    write_all(&storage, &log);
    let objects = ["a", "deep/er/b", "claimed"].map(|name| Key::new(name).unwrap());
    runtime().block_on(storage.delete(&objects)).unwrap();
    let events = log.events().len();

    let storage = FsStorage::open(other.path()).unwrap();
    write_all(&storage, &DiskLog::start(other.path()).unwrap());
    assert_eq!(log.events().len(), events);
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).build().unwrap()
}

/// Begins an upload, says so, and waits for the end.
fn write_and_wait(folder: &Path) -> ! {
    let storage = FsStorage::open(folder).unwrap();
    let runtime = runtime();
    let key = Key::new("put/theirs").unwrap();
    let mut upload = runtime
        .block_on(storage.start_upload(&key, UploadOptions::new(PutMode::Create, 1 << 20)))
        .unwrap();
    runtime.block_on(upload.put_part("abc".into())).unwrap();
    let mut out = std::io::stdout();
    out.write_all(b"begun").unwrap();
    out.flush().unwrap();
    loop {
        std::thread::park();
    }
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

/// Runs in a process that may not write files of more than 64 KiB.
fn write_too_much(folder: &Path) {
    let storage = FsStorage::open(folder).unwrap();
    let runtime = runtime();
    let key = Key::new("object").unwrap();
    let large = || Payload::from(vec![1; 300_000]);
    let error = runtime.block_on(storage.put(&key, large(), PutMode::Create)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Full, "{error}");
    let mut upload = runtime
        .block_on(storage.start_upload(&key, UploadOptions::new(PutMode::Create, 1 << 20)))
        .unwrap();
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
    let found = |age, action| {
        let found = runtime().block_on(storage.leftovers(None, age, action)).unwrap();
        found.into_iter().map(|one| (one.path, one.byte_len)).collect::<Vec<_>>()
    };
    let clean = |age| {
        let listed = found(age, LeftoverAction::List);
        assert_eq!(listed, found(age, LeftoverAction::List), "a list removes nothing");
        assert_eq!(listed, found(age, LeftoverAction::Remove));
        listed.len()
    };
    let old = Duration::ZERO;
    let key = |name: &str| Key::new(name).unwrap();

    // A leftover: one of a child that was killed while it wrote.
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(CHILD, folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let leftover = files(folder.path()).pop().unwrap();
    let name = leftover.file_name().unwrap();
    assert!(name.as_encoded_bytes().starts_with(b".dcp-tmp."), "{name:?}");
    let living = runtime();
    let mut upload = living
        .block_on(
            storage.start_upload(&key("put/mine"), UploadOptions::new(PutMode::Create, 1 << 20)),
        )
        .unwrap();
    living.block_on(upload.put_part("abc".into())).unwrap();
    let objects = runtime().block_on(storage.list(None).try_collect::<Vec<_>>()).unwrap();

    assert_eq!(clean(Duration::from_secs(3600)), 0, "it is too young");
    assert!(leftover.exists());
    assert_eq!(clean(old), 1);
    assert!(!leftover.exists());
    assert_eq!(clean(old), 0, "the upload of this process is in progress");
    living.block_on(upload.complete()).unwrap();
    let after = runtime().block_on(storage.list(None).try_collect::<Vec<_>>()).unwrap();
    assert_eq!(after.len(), objects.len() + 1, "an object was removed as a leftover");

    // One of another machine goes by its age alone.
    let distant = folder.path().join(".dcp-tmp.0123456789abcdef.1.1.0");
    fs::write(&distant, "x").unwrap();
    assert_eq!(clean(Duration::from_secs(3600)), 0);
    assert_eq!(clean(old), 1);
    assert!(!distant.exists());

    // The clock of that machine, which may be ahead, dates it.
    fs::write(&distant, "x").unwrap();
    let file = fs::File::options().write(true).open(&distant).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(3600)).unwrap();
    assert_eq!(clean(Duration::from_secs(1)), 0);
    assert_eq!(clean(old), 1);
    assert!(!distant.exists());
}
