//! Full disks, missing rights, symbolic links, and other things that are no checkpoint's fault.
//!
//! What needs a file system of its own is reported as ignored where mounting is not allowed.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, ExitCode};

use dcp_core::error::StorageOp;
use dcp_core::storage::{PutMode, StorageExt, UploadOptions};
use dcp_core::{Payload, Storage, StorageError, StorageErrorKind};
use dcp_storage_fs::FsStorage;
use dcp_testing::{block_on, key};
use futures_util::TryStreamExt;
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let may_mount = Mounted::new("size=4k").is_some();
    let trial = |name: &str, ignored: bool, run: fn()| {
        Trial::test(name, move || {
            run();
            Ok(())
        })
        .with_ignored_flag(ignored)
    };
    let trials = vec![
        trial(
            "a_full_disk_is_full_and_keeps_nothing",
            !may_mount,
            a_full_disk_is_full_and_keeps_nothing,
        ),
        trial(
            "a_folder_without_rights_is_denied",
            !may_mount && is_allowed_everything(),
            a_folder_without_rights_is_denied,
        ),
        trial("no_key_leads_out_of_the_root", false, no_key_leads_out_of_the_root),
        trial("what_is_no_regular_file_is_no_object", false, what_is_no_regular_file_is_no_object),
        trial("only_regular_files_are_replaced", false, only_regular_files_are_replaced),
        trial(
            "objects_and_folders_do_not_replace_each_other",
            false,
            objects_and_folders_do_not_replace_each_other,
        ),
        trial("names_of_temporary_files_are_no_keys", false, names_of_temporary_files_are_no_keys),
        trial("a_root_is_made_only_when_asked_for", false, a_root_is_made_only_when_asked_for),
        trial("a_storage_works_without_a_runtime", false, a_storage_works_without_a_runtime),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Whether the bits of a folder do not stop this user.
fn is_allowed_everything() -> bool {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    fs::write(folder.path().join("probe"), "x").is_ok()
}

fn names(storage: &FsStorage) -> Vec<String> {
    let listed = block_on(storage.list(None).try_collect::<Vec<_>>()).unwrap();
    let mut names = listed.iter().map(|meta| meta.key.to_string()).collect::<Vec<_>>();
    names.sort();
    names
}

async fn upload(storage: &FsStorage, name: &str, part: Payload) -> Result<(), StorageError> {
    let mut upload =
        storage.start_upload(&key(name), UploadOptions::new(PutMode::Create, 1 << 20)).await?;
    upload.put_part(part).await?;
    upload.complete().await.map(drop)
}

/// A file system in memory, unmounted on drop; `None` where this user may not mount.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(options: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(folder.path())
            .output();
        mount.is_ok_and(|output| output.status.success()).then_some(Self(folder))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).output();
    }
}

fn a_full_disk_is_full_and_keeps_nothing() {
    let disk = Mounted::new("size=256k").unwrap();
    let storage = FsStorage::open(disk.path()).unwrap();
    let old = Payload::from(vec![1; 50_000]);
    let large = || Payload::from(vec![2; 400_000]);
    block_on(storage.put(&key("old"), old.clone(), PutMode::Create)).unwrap();
    for (op, outcome) in [
        (StorageOp::Put, block_on(storage.put(&key("new"), large(), PutMode::Create)).map(drop)),
        (StorageOp::Put, block_on(storage.put(&key("old"), large(), PutMode::Overwrite)).map(drop)),
        (StorageOp::Upload, block_on(upload(&storage, "new", large()))),
    ] {
        let error = outcome.unwrap_err();
        assert_eq!((error.kind(), error.op()), (StorageErrorKind::Full, op), "{error}");
    }
    assert_eq!(names(&storage), ["old"]);
    assert_eq!(block_on(storage.read_all(&key("old"))).unwrap(), old.to_bytes());
    assert_eq!(fs::read_dir(disk.path()).unwrap().count(), 1, "a temporary file is left");
    block_on(storage.put(&key("new"), old, PutMode::Create)).unwrap();
}

fn a_folder_without_rights_is_denied() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("old"), "x").unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let mounted;
    let root = if fs::write(folder.path().join("probe"), "x").is_ok() {
        // A superuser is stopped by a read-only file system only.
        mounted = Mounted::new("ro,size=64k").unwrap();
        mounted.path()
    } else {
        folder.path()
    };
    let storage = FsStorage::open(root).unwrap();
    for name in ["new", "folder/new"] {
        let outcome = block_on(storage.put(&key(name), "x".into(), PutMode::Create));
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Denied, "{error}");
        assert_eq!(error.key(), Some(&key(name)));
        let error = block_on(upload(&storage, name, "x".into())).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Denied, "{error}");
    }
}

fn no_key_leads_out_of_the_root() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let outside = folder.path().join("outside");
    fs::create_dir(&root).unwrap();
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "s").unwrap();
    fs::write(root.join("file"), "f").unwrap();
    symlink("../outside", root.join("folder")).unwrap();
    symlink("../outside/secret", root.join("link")).unwrap();
    symlink("file", root.join("inner")).unwrap();
    symlink("nothing", root.join("dangling")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    let storage = FsStorage::open(&root).unwrap();
    for name in ["folder/secret", "link", "folder/new"] {
        let refused = [
            block_on(storage.stat(&key(name))).map(drop),
            block_on(storage.read_range(&key(name), 0..1)).map(drop),
        ];
        for outcome in refused {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::Link, "{name}: {error}");
        }
    }
    for name in ["folder/secret", "folder/new", "folder/deep/new"] {
        for mode in [PutMode::Create, PutMode::Overwrite] {
            let error = block_on(storage.put(&key(name), "x".into(), mode)).unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::Link, "{name}: {error}");
        }
        block_on(upload(&storage, name, "x".into())).unwrap_err();
        block_on(storage.delete(&[key(name)])).unwrap_err();
    }
    // A link in the object's place is replaced or removed, not followed.
    block_on(storage.put(&key("link"), "new".into(), PutMode::Overwrite)).unwrap();
    block_on(storage.delete(&[key("inner")])).unwrap();
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"s");
    assert_eq!(names(&storage), ["file", "link"]);
    let error = block_on(storage.list(Some(&key("folder"))).try_collect::<Vec<_>>()).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Link, "{error}");

    let storage = FsStorage::builder(&root).follow_links(true).open().unwrap();
    assert_eq!(block_on(storage.read_all(&key("folder/secret"))).unwrap(), "s");
    // One link is followed on the way to an object, so a circle comes to an end.
    symlink("..", outside.join("up")).unwrap();
    assert_eq!(names(&storage), ["file", "folder/secret", "link"]);
}

fn what_is_no_regular_file_is_no_object() {
    let folder = tempfile::tempdir().unwrap();
    let storage = FsStorage::open(folder.path()).unwrap();
    let pipe = Command::new("mkfifo").arg(folder.path().join("pipe")).status();
    assert!(pipe.unwrap().success());
    let socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).unwrap();
    for name in ["pipe", "socket"] {
        let error = block_on(storage.stat(&key(name))).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::NotFound);
        block_on(storage.read_range(&key(name), 0..1)).unwrap_err();
    }
    assert_eq!(names(&storage), [""; 0]);
    drop(socket);
}

fn only_regular_files_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let storage = FsStorage::open(folder.path()).unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).unwrap();
    symlink("pipe", folder.path().join("link to the pipe")).unwrap();
    symlink("/dev/null", folder.path().join("link to a device")).unwrap();
    let before = fs::read_dir(folder.path()).unwrap().count();
    for (name, said) in [
        ("pipe", "FIFO"),
        ("socket", "socket"),
        ("link to the pipe", "FIFO"),
        ("link to a device", "device"),
    ] {
        let key = key(name);
        for mode in [PutMode::Create, PutMode::Overwrite] {
            let put = block_on(storage.put(&key, "x".into(), mode.clone())).unwrap_err();
            let upload = block_on(storage.start_upload(&key, UploadOptions::new(mode, 1 << 20)))
                .unwrap_err();
            for error in [put, upload] {
                let kinds = [StorageErrorKind::Invalid, StorageErrorKind::Link];
                assert!(kinds.contains(&error.kind()), "{name}: {error}");
                let text = dcp_core::error::error_chain(&error);
                let special = text.contains(said) && text.contains("only regular files");
                assert!(special || text.contains("leads out of the folder"), "{text}");
            }
        }
        // What appears while the bytes are written is not replaced either.
        let free = folder.path().join("free");
        let upload = block_on(
            storage
                .start_upload(&self::key("free"), UploadOptions::new(PutMode::Overwrite, 1 << 20)),
        );
        fs::rename(folder.path().join(name), &free).unwrap();
        block_on(upload.unwrap().complete()).unwrap_err();
        fs::rename(&free, folder.path().join(name)).unwrap();
    }
    assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), before);
    drop(socket);
}

fn objects_and_folders_do_not_replace_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let storage = FsStorage::open(folder.path()).unwrap();
    block_on(storage.put(&key("a/b"), "x".into(), PutMode::Create)).unwrap();
    for name in ["a", "a/b/c", "a/b/c/d"] {
        for mode in [PutMode::Create, PutMode::Overwrite] {
            let error = block_on(storage.put(&key(name), "y".into(), mode)).unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::Invalid, "{name}: {error}");
        }
    }
    assert_eq!(block_on(storage.read_all(&key("a/b"))).unwrap(), "x");
    assert_eq!(names(&storage), ["a/b"]);
}

fn names_of_temporary_files_are_no_keys() {
    let folder = tempfile::tempdir().unwrap();
    let storage = FsStorage::open(folder.path()).unwrap();
    let name = ".dcp-tmp.0123456789abcdef.1.2.3";
    let error = block_on(storage.put(&key(name), "x".into(), PutMode::Create)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Invalid);
    fs::write(folder.path().join(name), "x").unwrap();
    let error = block_on(storage.stat(&key(name))).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::NotFound);
    assert_eq!(names(&storage), [""; 0]);
}

fn a_root_is_made_only_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("a/b");
    assert_eq!(FsStorage::open(&root).unwrap_err().kind(), StorageErrorKind::NotFound);
    let storage = FsStorage::builder(&root).create(true).open().unwrap();
    assert_eq!(storage.root(), root);
    FsStorage::open(&root).unwrap();
    fs::write(folder.path().join("file"), "x").unwrap();
    FsStorage::builder(folder.path().join("file")).create(true).open().unwrap_err();
    FsStorage::builder(folder.path().join("file/x")).create(true).open().unwrap_err();
}

fn a_storage_works_without_a_runtime() {
    use futures_util::FutureExt;

    let folder = tempfile::tempdir().unwrap();
    let storage = FsStorage::open(folder.path()).unwrap();
    let mut writing = storage
        .start_upload(&key("a"), UploadOptions::new(PutMode::Create, 1 << 20))
        .now_or_never()
        .unwrap()
        .unwrap();
    writing.put_part("abc".into()).now_or_never().unwrap().unwrap();
    writing.put_part("def".into()).now_or_never().unwrap().unwrap();
    writing.complete().now_or_never().unwrap().unwrap();
    assert_eq!(storage.read_all(&key("a")).now_or_never().unwrap().unwrap(), "abcdef");
}
