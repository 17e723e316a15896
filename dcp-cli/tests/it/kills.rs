//! Commands that a signal ends while they write, as no handler can notice, and commands whose disk is
//! full there.
//!
//! A limit on the length of files is a full disk: where it is met depends on the lengths of the files
//! alone. A kill comes when so many changes of the target were seen; one that comes too late finds the
//! command done, so kills are repeated until some came before. That a command survives its end at every
//! operation, `every_operation` shows; here real processes leave real temporary files.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;

use crate::megatron::megatron;
use crate::support::{command, dcp, fixtures, path};

const OLD: &str = "run_torch_dist_dp2/iter_0000010";
const NEW: &str = "gpt_tp2pp2_swiglu/ckpt";

/// Limits of files in blocks of 512 bytes: from less than the smallest has to more than any.
const LIMITS: [u32; 7] = [1, 3, 6, 12, 24, 96, 1 << 20];

/// Kills that must come before the command is done, and attempts for them.
const KILLS_MIN: usize = 3;
const ATTEMPTS_MAX: usize = 100;

/// Runs the command with files of at most so many blocks.
fn limited(args: &[&str], blocks: u32) -> Output {
    let program = command().get_program().to_owned();
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -c 0; ulimit -f {blocks}; exec \"$@\""));
    shell
        .current_dir(fixtures())
        .arg("sh")
        .arg(program)
        .args(args)
        .env_remove("DCP_LOG")
        .output()
        .unwrap()
}

/// Runs the command, and kills it when the files of `target` have changed so many times. Returns whether
/// the kill came before the command was done.
fn killed(args: &[&str], target: &Path, changes: usize) -> bool {
    let mut child = command()
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (mut seen, mut before) = (0, lengths(target));
    loop {
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        let now = lengths(target);
        seen += usize::from(now != before);
        before = now;
        if seen > changes {
            child.kill().unwrap();
            return child.wait().unwrap().signal().is_some();
        }
        thread::yield_now();
    }
}

/// The files below a folder with their lengths, some of which may go meanwhile.
fn lengths(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            match meta.is_dir() {
                true => open.push(entry.path()),
                false => _ = found.insert(entry.path(), meta.len()),
            }
        }
    }
    found
}

fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        let Ok(entries) = fs::read_dir(folder) else { continue };
        for path in entries.map(|entry| entry.unwrap().path()) {
            match path.is_dir() {
                true => open.push(path),
                false => _ = files.insert(path.clone(), fs::read(path).unwrap()),
            }
        }
    }
    files
}

fn is_temporary(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".dcp-tmp."))
}

/// Ends a command that writes `target` in the middle of its files, over nothing and over `old`. Where
/// weights and configuration are replaced together, there may be no whole model in between.
fn survives(command: &[&str], to: &[&str], may_be_none: bool, old: &dyn Fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let all = |target: &str| -> Vec<String> {
        let args = command.iter().copied().chain([target]).chain(to.iter().copied());
        args.map(str::to_owned).collect()
    };
    let whole = path(&folder, "whole");
    dcp(all(&whole)).ok();
    let before = path(&folder, "before");
    old(before.as_ref());
    let begin = |name: &str, overwrite: bool| {
        let target = path(&folder, name);
        let mut args = all(&target);
        if overwrite {
            dcp_testing::copy_folder(before.as_ref(), target.as_ref());
            args.push("--overwrite".to_owned());
        }
        (target, args)
    };
    let end = |target: &str, args: &[&str], overwrite: bool| {
        let again = args.iter().copied().chain((!overwrite).then_some("--overwrite"));
        dcp(again).ok();
        dcp(["diff", target, &whole]).ok();
        let left = files(target.as_ref());
        assert!(!left.keys().any(|name| is_temporary(name)), "{:?}", left.keys());
        assert_eq!(left.len(), files(whole.as_ref()).len(), "{:?}", left.keys());
    };
    let mut refused = 0;
    for overwrite in [false, true] {
        for blocks in LIMITS {
            let (target, args) = begin(&format!("{overwrite}{blocks}"), overwrite);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let was = files(target.as_ref());
            let output = limited(&args, blocks);
            if output.status.success() {
                dcp(["diff", &target, &whole]).ok();
                continue;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(3), "{said}");
            let left = files(target.as_ref());
            assert!(left == was, "{said} leaves {:?}", left.keys());
            refused += 1;
            end(&target, &args, overwrite);
        }
    }
    assert!(refused > 2, "{refused} were refused");
    for overwrite in [false, true] {
        let mut kills = 0;
        for attempt in 0..ATTEMPTS_MAX {
            let (target, args) = begin(&format!("kill{overwrite}{attempt}"), overwrite);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let came = killed(&args, target.as_ref(), attempt % 8);
            kills += usize::from(came);
            let is = |other: &str| dcp(["diff", &target, other]).code == 0;
            let verified = dcp(["verify", &target, "--deep"]).code;
            let is_known = is(&whole) || overwrite && is(&before);
            let is_none = verified != 0 && (!overwrite || may_be_none);
            let left = files(target.as_ref());
            assert!(is_known || is_none, "{attempt}: {verified}, {:?}", left.keys());
            end(&target, &args, overwrite);
            if kills >= KILLS_MIN {
                break;
            }
        }
        assert!(kills >= KILLS_MIN, "{kills} of {ATTEMPTS_MAX} kills came before the end");
    }
}

fn an_old_checkpoint_of_megatron(at: &Path) {
    dcp(["convert", &megatron(OLD), at.to_str().unwrap(), "--to", "torch-dist"]).ok();
}

#[test]
fn a_killed_conversion_to_torch_dist_leaves_one_whole_checkpoint_or_none() {
    let command = ["convert", &megatron(NEW)];
    survives(&command, &["--to", "torch-dist"], false, &an_old_checkpoint_of_megatron);
}

#[test]
fn a_killed_reshard_of_megatron_leaves_one_whole_checkpoint_or_none() {
    let command = ["reshard", &megatron(NEW)];
    survives(&command, &["--tp", "1", "--pp", "2"], false, &an_old_checkpoint_of_megatron);
}

#[test]
fn a_killed_conversion_to_hugging_face_leaves_one_whole_model_or_none() {
    let command = ["convert", &megatron(OLD)];
    let to = ["--to", "hf", "--max-shard-size", "9000"];
    survives(&command, &to, true, &|at| {
        let at = at.to_str().unwrap();
        let to = ["--to", "hf", "--max-shard-size", "600", "--dtype", "fp16"];
        dcp(["convert", &megatron(OLD), at].iter().chain(&to)).ok();
    });
}

#[test]
fn a_killed_conversion_to_dcp_leaves_one_whole_checkpoint_or_none() {
    let command = ["convert", "fsdp2_adam_2r"];
    survives(&command, &["--to", "dcp", "--ranks", "3"], false, &|at| {
        dcp(["convert", "t21_plain", at.to_str().unwrap(), "--to", "dcp"]).ok();
    });
}

/// A run goes on to name the checkpoint that was whole before.
#[test]
fn a_killed_conversion_into_a_run_leaves_what_its_tracker_names() {
    let folder = tempfile::tempdir().unwrap();
    let run = path(&folder, "run");
    dcp_testing::copy_folder(megatron("run_torch_dist_dp2").as_ref(), run.as_ref());
    let tracker = Path::new(&run).join("latest_checkpointed_iteration.txt");
    let named = fs::read_to_string(&tracker).unwrap();
    let mut kills = 0;
    for round in 0..ATTEMPTS_MAX {
        let target = format!("{run}/iter_{:07}", 20 + round);
        let args = ["convert", &megatron(NEW), &target, "--to", "torch-dist"];
        kills += usize::from(killed(&args, target.as_ref(), round % 8));
        assert_eq!(fs::read_to_string(&tracker).unwrap(), named);
        let found = dcp(["inspect", &run, "--json"]);
        assert!(found.stderr.contains("iter_0000010"), "{}", found.stderr);
        dcp(["diff", &run, &megatron(OLD)]).ok();
        let listed = dcp(["ls", &run, "--json"]).json();
        for entry in listed["entries"].as_array().unwrap() {
            let name = entry["name"].as_str().unwrap();
            if !name.starts_with("iter_") {
                continue;
            }
            let whole = Path::new(&run).join(name).join("metadata.json").exists();
            assert!(whole || entry["complete"] == false, "{entry}");
        }
        if kills >= KILLS_MIN {
            return;
        }
    }
    panic!("{kills} of {ATTEMPTS_MAX} kills came before the end");
}
