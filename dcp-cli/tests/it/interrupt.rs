//! Stopping a command in the middle of its work, and what is left then.

#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use dcp::DType;
use dcp::formats::safetensors::{SafetensorsItem, encode_header};
use dcp_conformance::http::{FaultRule, HttpFault};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;

use crate::ranks_bucket::Bucket;
use crate::support::{Run, command, dcp, finish, path};

/// Longer than any of it takes.
const ENOUGH: Timespec = Timespec { tv_sec: 600, tv_nsec: 0 };

/// A checkpoint of 4 TiB that takes no space: its end is a hole. No machine has read it before a check
/// says how far it is.
pub(crate) fn larger(folder: &tempfile::TempDir) -> String {
    tensors(folder, 1 << 15, 1 << 24)
}

/// A checkpoint of 16 MiB in a bucket that stops to answer. A command has written a part of what it
/// makes, and is done with no more before a signal comes.
struct Stalling {
    bucket: Bucket,
    url: &'static str,
}

impl Stalling {
    /// Requests for data that are answered, of 64 KiB or less each.
    const ANSWERED: u64 = 48;
    /// Options of commands: they wait for an answer longer than any test.
    const PATIENT: [&str; 3] = [
        "--storage-option=timeout=1 day",
        "--storage-option=stall_timeout=86400",
        "--storage-option=deadline=86400",
    ];

    fn start() -> Self {
        let (bucket, folder) = (Bucket::start(), tempfile::tempdir().unwrap());
        let url = "s3://bucket/large.safetensors";
        bucket.alone(&["convert", &tensors(&folder, 1 << 11, 1 << 10), url]).ok();
        Self { bucket, url }
    }

    /// Runs a command that reads [`url`](Self::url), as [`interrupted`] does.
    fn interrupted(
        &self,
        args: &[&str],
        signal: &str,
        folder: &Path,
        ready: impl Fn() -> bool,
    ) -> Run {
        self.bucket.proxy.calm();
        let stall = FaultRule::new(HttpFault::Stall).method("GET").containing("large");
        self.bucket.proxy.add(stall.after(Self::ANSWERED));
        let args =
            self.bucket.args(&[&Self::PATIENT, args, &["--max-memory=512KiB"]].concat(), true);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        interrupted(&args, signal, folder, ready)
    }
}

/// A file of two tensors of zeros, which take no space.
fn tensors(folder: &tempfile::TempDir, rows: u64, columns: u64) -> String {
    let item = |name: &str| SafetensorsItem {
        name: name.into(),
        dtype: DType::Float32,
        shape: [rows, columns].into(),
    };
    let encoded = encode_header(&[item("a"), item("b")], &Default::default()).unwrap();
    let path = path(folder, "large.safetensors");
    fs::write(&path, &encoded.bytes).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(encoded.byte_len).unwrap();
    path
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Runs a command until what is below `folder` is `ready`, and then sends it a signal. It is
/// quiet: where it takes longer, it says how far it is before it fails.
fn interrupted(args: &[&str], signal: &str, folder: &Path, ready: impl Fn() -> bool) -> Run {
    let changes = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    let child =
        command().arg("--quiet").args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child: Child = child.unwrap();
    loop {
        watch(&changes, folder);
        // What was made before its folder was watched is seen now, and all else is an event.
        if ready() {
            break;
        }
        let output = child.stdout.as_ref().unwrap();
        let mut events = [PollFd::new(&changes, PollFlags::IN), PollFd::new(output, PollFlags::IN)];
        assert_ne!(poll(&mut events, Some(&ENOUGH)).unwrap(), 0, "it did not get there");
        let is_there = events[1].revents().is_empty();
        assert!(is_there, "it ended before the signal: {:?}", child.wait_with_output());
        let mut buffer = [MaybeUninit::uninit(); 4096];
        inotify::Reader::new(&changes, &mut buffer).next().unwrap();
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
    finish(child.wait_with_output().unwrap())
}

/// Requests an event when a name comes up in the folder or in one below.
fn watch(changes: &OwnedFd, folder: &Path) {
    let events = inotify::WatchFlags::CREATE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(changes, folder, events).unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            watch(changes, &path);
        }
    }
}

fn is_temporary(name: &str) -> bool {
    name.starts_with(".dcp-tmp.") || name.starts_with(".dcp-lock.")
}

#[test]
fn a_file_in_the_making_goes() {
    let folder = tempfile::tempdir().unwrap();
    let source = Stalling::start();
    let target = path(&folder, "copy.safetensors");
    let args = ["convert", source.url, &target, "--to", "safetensors"];
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let begun = || names(folder.path()).iter().any(|name| is_temporary(name));
        source
            .interrupted(&args, signal, folder.path(), begun)
            .fails(code, &["interrupted; nothing was written"]);
        assert_eq!(names(folder.path()), [""; 0]);
    }
}

#[test]
fn an_old_file_stays() {
    let folder = tempfile::tempdir().unwrap();
    let source = Stalling::start();
    let target = path(&folder, "old.safetensors");
    fs::write(&target, "old").unwrap();
    let begun = || names(folder.path()).iter().any(|name| is_temporary(name));
    let args = ["convert", source.url, &target, "--to", "safetensors", "--overwrite"];
    source.interrupted(&args, "INT", folder.path(), begun).fails(130, &["nothing was written"]);
    assert_eq!(names(folder.path()), ["old.safetensors"]);
    assert_eq!(fs::read(&target).unwrap(), b"old");
}

#[test]
fn files_that_are_complete_already_go_with_their_folders() {
    let folder = tempfile::tempdir().unwrap();
    let source = Stalling::start();
    let target = folder.path().join("deep/er");
    let args = ["reshard", source.url, target.to_str().unwrap(), "--ranks", "256"];
    let one_is_there = || names(&target).iter().any(|name| name.ends_with(".distcp"));
    source
        .interrupted(&args, "INT", folder.path(), one_is_there)
        .fails(130, &["interrupted; nothing was written"]);
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn an_old_checkpoint_stays() {
    let folder = tempfile::tempdir().unwrap();
    let source = Stalling::start();
    let target = folder.path().join("old");
    let uri = target.to_str().unwrap();
    dcp(["reshard", "fsdp2_adam_2r", uri, "--ranks", "2"]).ok();
    let before = names(&target);
    let one_is_there = || names(&target).iter().any(|name| name.ends_with(".g1.distcp"));
    let args = ["reshard", source.url, uri, "--ranks", "256", "--overwrite"];
    source
        .interrupted(&args, "TERM", folder.path(), one_is_there)
        .fails(143, &["interrupted; nothing was written"]);
    assert_eq!(names(&target), before);
    dcp(["verify", uri, "--deep"]).ok();
}

#[test]
fn an_old_checkpoint_of_megatron_stays() {
    let folder = tempfile::tempdir().unwrap();
    let source = Stalling::start();
    let target = folder.path().join("old");
    let uri = target.to_str().unwrap();
    let fixture = crate::megatron::megatron("tp2_basic/ckpt");
    dcp(["convert", &fixture, uri, "--to", "torch-dist"]).ok();
    let before = names(&target);
    let begun = || names(&target).iter().any(|name| is_temporary(name));
    let args = ["convert", source.url, uri, "--to", "torch-dist", "--overwrite"];
    source
        .interrupted(&args, "INT", folder.path(), begun)
        .fails(130, &["interrupted; nothing was written"]);
    assert_eq!(names(&target), before);
    dcp(["diff", &fixture, uri]).ok();
    let new = folder.path().join("run/iter_0000001");
    let args = ["convert", source.url, new.to_str().unwrap(), "--to", "torch-dist"];
    let begun = || names(&new).iter().any(|name| is_temporary(name));
    source
        .interrupted(&args, "TERM", folder.path(), begun)
        .fails(143, &["interrupted; nothing was written"]);
    assert_eq!(names(folder.path()), ["old"]);
}

#[test]
fn a_log_has_lines_of_long_work_only() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "short.safetensors");
    let run = dcp(["convert", "fsdp2_adam_2r", &target, "--to", "safetensors"]);
    assert!(!run.stderr.contains("converting"), "{}", run.stderr);
}
