//! Commands that write from or to Megatron-Core, killed at any moment.
//!
//! A killed command cannot clean up. What it leaves is no checkpoint for anybody, or a whole one.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use crate::megatron::{copy_into, megatron};
use crate::support::{command, dcp, path};

/// Kills of each command with each kind of target.
const ROUNDS: u32 = 8;

const OLD: &str = "run_torch_dist_dp2/iter_0000010";
const NEW: &str = "gpt_tp2pp2_swiglu/ckpt";

/// How long a command takes that nobody kills.
fn measured(args: &[&str]) -> Duration {
    let begin = Instant::now();
    dcp(args.iter().copied()).ok();
    begin.elapsed()
}

/// Starts a command and ends it, as no handler can notice, after `delay`; whether it was at work.
fn killed(args: &[&str], delay: Duration) -> bool {
    let child = command().args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = child.unwrap();
    thread::sleep(delay);
    let at_work = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    at_work
}

/// What a target is, judged by the file without which nobody takes it for a checkpoint.
#[derive(Debug, PartialEq)]
enum Left {
    Nothing,
    Old,
    New,
}

/// What is left at `target`; panics when it passes for a checkpoint and is neither of the two.
fn left(target: &str, marker: &str, old: Option<&str>, new: &str) -> Left {
    if !Path::new(target).join(marker).exists() {
        return Left::Nothing;
    }
    dcp(["verify", target, "--deep"]).ok();
    let is = |other: &str| dcp(["diff", target, other]).code == 0;
    if old.is_some_and(is) {
        return Left::Old;
    }
    assert!(is(new), "{target} passes for a checkpoint, and is neither the old nor the new one");
    Left::New
}

/// Kills a command that writes `target`, again and again, over nothing and over `old`.
fn survives(command: &[&str], to: &[&str], marker: &str, old: &dyn Fn(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let whole = path(&folder, "whole");
    let all = |target: &str| -> Vec<String> {
        let args = command.iter().copied().chain([target]).chain(to.iter().copied());
        args.map(str::to_owned).collect()
    };
    let mut time = {
        let args = all(&whole);
        measured(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let before = path(&folder, "before");
    old(before.as_ref());
    let (mut killed_at_work, mut found) = (0, Vec::new());
    for overwrite in [false, true] {
        for round in 0..ROUNDS {
            let target = path(&folder, &format!("{overwrite}{round}"));
            let mut args = all(&target);
            if overwrite {
                copy_into(before.as_ref(), target.as_ref());
                args.push("--overwrite".to_owned());
            }
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let delay = time * (2 * round + 1) / (2 * ROUNDS);
            if killed(&args, delay) {
                killed_at_work += 1;
            } else {
                // The machine is faster than it was.
                time = delay;
            }
            let left = left(&target, marker, overwrite.then_some(&*before), &whole);
            assert!(overwrite || left != Left::Old);
            found.push(left);
            // The next try needs no help.
            let again: Vec<&str> = match args.contains(&"--overwrite") {
                true => args.clone(),
                false => args.iter().copied().chain(["--overwrite"]).collect(),
            };
            if round % 4 == 0 {
                dcp(again).ok();
                assert_eq!(self::left(&target, marker, None, &whole), Left::New);
            }
        }
    }
    assert!(killed_at_work > 0, "all of them were done before: {found:?}");
}

fn an_old_checkpoint_of_megatron(at: &Path) {
    copy_into(megatron(OLD).as_ref(), at);
}

#[test]
fn a_killed_conversion_to_torch_dist_leaves_one_whole_checkpoint_or_none() {
    let command = ["convert", &megatron(NEW)];
    survives(&command, &["--to", "torch-dist"], "metadata.json", &an_old_checkpoint_of_megatron);
}

#[test]
fn a_killed_reshard_of_megatron_leaves_one_whole_checkpoint_or_none() {
    let command = ["reshard", &megatron(NEW)];
    let layout = ["--tp", "1", "--pp", "2"];
    survives(&command, &layout, "metadata.json", &an_old_checkpoint_of_megatron);
}

#[test]
fn a_killed_conversion_to_hugging_face_leaves_one_whole_model_or_none() {
    let command = ["convert", &megatron(OLD)];
    let to = ["--to", "hf", "--max-shard-size", "512"];
    survives(&command, &to, "model.safetensors.index.json", &|at| {
        let at = at.to_str().unwrap();
        let to = ["--to", "hf", "--max-shard-size", "600", "--dtype", "fp16"];
        dcp(["convert", &megatron(OLD), at].iter().chain(&to)).ok();
    });
}

/// A run goes on to name the checkpoint that was whole before.
#[test]
fn a_killed_conversion_into_a_run_leaves_what_its_tracker_names() {
    let folder = tempfile::tempdir().unwrap();
    let run = path(&folder, "run");
    copy_into(megatron("run_torch_dist_dp2").as_ref(), run.as_ref());
    let tracker = Path::new(&run).join("latest_checkpointed_iteration.txt");
    let named = fs::read_to_string(&tracker).unwrap();
    let spare = path(&folder, "spare");
    let time = measured(&["convert", &megatron(NEW), &spare, "--to", "torch-dist"]);
    for round in 0..ROUNDS {
        let target = format!("{run}/iter_{:07}", 20 + round);
        let args = ["convert", &megatron(NEW), &target, "--to", "torch-dist"];
        killed(&args, time * (2 * round + 1) / (2 * ROUNDS));
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
}
