//! A disk that is full, and a folder that must not be written.
//!
//! Both need a small file system of their own. Where mounting is not allowed, the tests are
//! reported as ignored.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::Path;
use std::process::{Command, ExitCode};

use dcp::core::{CheckpointError, StorageErrorKind};
use libtest_mimic::{Arguments, Trial};

#[path = "support/state.rs"]
mod state;

use state::{load, state};

fn main() -> ExitCode {
    let cannot_mount = Mount::new("size=4k").is_none();
    let trial = |name: &str, run: fn()| {
        Trial::test(name, move || {
            run();
            Ok(())
        })
        .with_ignored_flag(cannot_mount)
    };
    let trials = vec![
        trial("a_full_disk_keeps_the_old_checkpoint", a_full_disk_keeps_the_old_checkpoint),
        trial(
            "a_read_only_place_is_denied_and_still_readable",
            a_read_only_place_is_denied_and_still_readable,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// A small file system of its own, unmounted on drop; `None` where mounting is not allowed.
struct Mount(tempfile::TempDir);

impl Mount {
    fn new(options: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(folder.path())
            .stderr(std::process::Stdio::null())
            .status();
        status.is_ok_and(|status| status.success()).then(|| Self(folder))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn remount(&self, options: &str) {
        let remount = format!("remount,{options}");
        let status = Command::new("mount").args(["-o", &remount]).arg(self.path()).status();
        assert!(status.unwrap().success());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}

fn kind(error: &CheckpointError) -> Option<StorageErrorKind> {
    match error {
        CheckpointError::Storage(error) => Some(error.kind()),
        _ => None,
    }
}

fn a_full_disk_keeps_the_old_checkpoint() {
    let mount = Mount::new("size=800k").unwrap();
    let place = mount.path().join("run").display().to_string();
    dcp::save(&state(1, 0, 1), &place).blocking().unwrap();
    let error = dcp::save(&state(2, 0, 1), &place).blocking().unwrap_err();
    // A checkpoint has 460 KB, so a second one does not fit beside it.
    assert_eq!(kind(&error), Some(StorageErrorKind::Full), "{error}");
    assert_eq!(load(&place).unwrap(), 1);
    mount.remount("size=8m");
    dcp::save(&state(3, 0, 1), &place).blocking().unwrap();
    assert_eq!(load(&place).unwrap(), 3);
}

fn a_read_only_place_is_denied_and_still_readable() {
    let mount = Mount::new("size=4m").unwrap();
    let place = mount.path().join("run").display().to_string();
    dcp::save(&state(1, 0, 1), &place).blocking().unwrap();
    mount.remount("ro");
    let error = dcp::save(&state(2, 0, 1), &place).blocking().unwrap_err();
    assert_eq!(kind(&error), Some(StorageErrorKind::Denied), "{error}");
    // PyTorch 2.15 needs a writable parent folder even to read.
    assert_eq!(load(&place).unwrap(), 1);
}
