//! Commands that a signal ends in the middle of a write, as no handler can notice, and commands
//! whose disk is full there.
//!
//! A limit on the length of files does both: the system ends a process that would write a longer
//! one, or refuses the write where the signal is ignored. Where that happens depends on the lengths of
//! the files alone. That a command survives its end at every operation, `every_operation` shows; here
//! real processes leave real temporary files.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::megatron::megatron;
use crate::support::{command, dcp, fixtures, path};

const OLD: &str = "run_torch_dist_dp2/iter_0000010";
const NEW: &str = "gpt_tp2pp2_swiglu/ckpt";

/// Limits of files in blocks of 512 bytes: from less than the smallest has to more than any.
const LIMITS: [u32; 7] = [1, 3, 6, 12, 24, 96, 1 << 20];

/// Runs the command with files of at most so many blocks.
fn limited(args: &[&str], blocks: u32, ignored: bool) -> Output {
    let trap = if ignored { "trap '' XFSZ;" } else { "" };
    let program = command().get_program().to_owned();
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{trap} ulimit -c 0; ulimit -f {blocks}; exec \"$@\""));
    shell
        .current_dir(fixtures())
        .arg("sh")
        .arg(program)
        .args(args)
        .env_remove("DCP_LOG")
        .output()
        .unwrap()
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

/// Ends a command that writes `target` in the middle of its files, over nothing and over `old`.
fn survives(command: &[&str], to: &[&str], old: &dyn Fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let all = |target: &str| -> Vec<String> {
        let args = command.iter().copied().chain([target]).chain(to.iter().copied());
        args.map(str::to_owned).collect()
    };
    let whole = path(&folder, "whole");
    dcp(all(&whole)).ok();
    let before = path(&folder, "before");
    old(before.as_ref());
    let (mut killed, mut refused, mut temporary) = (0, 0, 0);
    for (overwrite, ignored) in [(false, false), (true, false), (false, true), (true, true)] {
        for blocks in LIMITS {
            let target = path(&folder, &format!("{overwrite}{ignored}{blocks}"));
            let mut args = all(&target);
            if overwrite {
                dcp_testing::copy_folder(before.as_ref(), target.as_ref());
                args.push("--overwrite".to_owned());
            }
            let was = files(target.as_ref());
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let output = limited(&args, blocks, ignored);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let left = files(target.as_ref());
            if output.status.success() {
                dcp(["diff", &target, &whole]).ok();
                continue;
            }
            match output.status.signal() {
                Some(_) => killed += 1,
                None => {
                    assert_eq!(output.status.code(), Some(3), "{said}");
                    assert!(left == was, "{said} leaves {:?}", left.keys());
                    refused += 1;
                }
            }
            temporary += usize::from(left.keys().any(|name| is_temporary(name)));
            // What was there is as it was: no file was complete that could have replaced it.
            assert!(was.iter().all(|(name, bytes)| left.get(name) == Some(bytes)), "{said}");
            if !overwrite {
                let verified = dcp(["verify", &target, "--deep"]);
                assert_ne!(verified.code, 0, "{:?} passes for whole", left.keys());
            }
            let again = args.iter().copied().chain((!overwrite).then_some("--overwrite"));
            dcp(again).ok();
            dcp(["diff", &target, &whole]).ok();
            let left = files(target.as_ref());
            assert!(!left.keys().any(|name| is_temporary(name)), "{:?}", left.keys());
            assert_eq!(left.len(), files(whole.as_ref()).len(), "{:?}", left.keys());
        }
    }
    assert!(killed > 2 && refused > 2, "{killed} were killed, {refused} refused");
    assert!(temporary > 0, "no temporary file was left");
}

fn an_old_checkpoint_of_megatron(at: &Path) {
    dcp(["convert", &megatron(OLD), at.to_str().unwrap(), "--to", "torch-dist"]).ok();
}

#[test]
fn a_killed_conversion_to_torch_dist_leaves_one_whole_checkpoint_or_none() {
    let command = ["convert", &megatron(NEW)];
    survives(&command, &["--to", "torch-dist"], &an_old_checkpoint_of_megatron);
}

#[test]
fn a_killed_reshard_of_megatron_leaves_one_whole_checkpoint_or_none() {
    let command = ["reshard", &megatron(NEW)];
    survives(&command, &["--tp", "1", "--pp", "2"], &an_old_checkpoint_of_megatron);
}

#[test]
fn a_killed_conversion_to_hugging_face_leaves_one_whole_model_or_none() {
    let command = ["convert", &megatron(OLD)];
    let to = ["--to", "hf", "--max-shard-size", "9000"];
    survives(&command, &to, &|at| {
        let at = at.to_str().unwrap();
        let to = ["--to", "hf", "--max-shard-size", "600", "--dtype", "fp16"];
        dcp(["convert", &megatron(OLD), at].iter().chain(&to)).ok();
    });
}

#[test]
fn a_killed_conversion_to_dcp_leaves_one_whole_checkpoint_or_none() {
    let command = ["convert", "fsdp2_adam_2r"];
    survives(&command, &["--to", "dcp", "--ranks", "3"], &|at| {
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
    let mut killed = 0;
    for (round, blocks) in LIMITS.into_iter().enumerate() {
        let target = format!("{run}/iter_{:07}", 20 + round);
        let args = ["convert", &megatron(NEW), &target, "--to", "torch-dist"];
        killed += usize::from(limited(&args, blocks, false).status.signal().is_some());
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
    }
    assert!(killed > 0, "all of them were done before");
}
