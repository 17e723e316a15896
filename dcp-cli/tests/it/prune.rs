//! `dcp prune` of a run on disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::support::{dcp, fixtures};

const SOURCE: &str = "t21_plain";

/// A run of these steps, and a file and a folder that are none.
fn run(steps: &[u64]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    for step in steps {
        let target = folder.path().join(format!("step-{step}"));
        dcp_testing::copy_folder(&fixtures().join(SOURCE), &target);
    }
    fs::write(folder.path().join("train.log"), "log").unwrap();
    dcp_testing::copy_folder(&fixtures().join(SOURCE), &folder.path().join("llama-3-8b"));
    let uri = folder.path().display().to_string();
    (folder, uri)
}

fn names(uri: &str) -> Vec<String> {
    let entries = fs::read_dir(uri).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn deleted(json: &Value) -> Vec<&str> {
    let steps = json["steps"].as_array().unwrap().iter().filter(|one| one["delete"] == true);
    steps.map(|one| one["name"].as_str().unwrap()).collect()
}

#[test]
fn a_dry_run_says_what_goes_and_why_and_yes_deletes_that() {
    let (_folder, uri) = run(&[10, 20, 30, 40]);
    let before = names(&uri);
    let text = dcp(["prune", &uri, "--keep-last", "1", "--keep-every", "20", "--dry-run"]).ok();
    for said in
        ["step-10  delete", "none of: the last 1, multiples of 20 steps", "2 of them to delete"]
    {
        assert!(text.contains(said), "{said:?} is not in\n{text}");
    }
    assert_eq!(names(&uri), before);
    let args = ["prune", &uri, "--keep-last", "1", "--keep-every", "20", "--json"];
    let planned = dcp([&args[..], &["--dry-run"]].concat()).json();
    assert_eq!(deleted(&planned), ["step-10", "step-30"]);
    assert_eq!(
        (&planned["dry_run"], planned["deleted"].as_array().unwrap().len()),
        (&true.into(), 0)
    );
    let done = dcp([&args[..], &["--yes"]].concat()).json();
    assert_eq!(deleted(&done), ["step-10", "step-30"]);
    assert_eq!((&done["bytes"], &done["files"]), (&planned["bytes"], &planned["files"]));
    assert_eq!(names(&uri), ["llama-3-8b", "step-20", "step-40", "train.log"]);
    let text = dcp(["prune", &uri, "--keep-last", "1", "--yes"]).ok();
    assert!(text.contains("deleted step-20"), "{text}");
    assert!(text.contains("1 checkpoint deleted"), "{text}");
    dcp(["verify", &format!("{uri}/step-40"), "--deep"]).ok();
}

/// `best_k_models` and `best_model_path` of the callback `ModelCheckpoint`, in the state of the trainer.
#[test]
fn the_best_of_lightning_stays_and_its_metrics_count() {
    let folder = tempfile::tempdir().unwrap();
    let name = |step: u32| format!("epoch=0-step={step}.ckpt");
    for step in [2, 4, 6] {
        let target = folder.path().join(name(step));
        dcp_testing::copy_folder(&fixtures().join(SOURCE), &target);
        let state = fixtures().join("../other_programs/lightning/meta.pt");
        fs::copy(state, target.join("meta.pt")).unwrap();
    }
    let uri = folder.path().display().to_string();
    let last = dcp(["prune", &uri, "--keep-last", "1", "--dry-run", "--json"]).json();
    assert_eq!(deleted(&last), [name(4)]);
    assert_eq!(last["steps"][0]["metrics"]["val_loss"], 0.25);
    assert!(last["steps"][0]["reason"].to_string().contains("names it as the best"), "{last:#}");
    let best = ["prune", &uri, "--keep-best", "1", "--metric", "val_loss", "--lowest", "--yes"];
    dcp(best).ok();
    assert_eq!(names(&uri), [name(2), name(6)]);
    // The folder of the last one is no step, and has the state, too.
    fs::rename(folder.path().join(name(6)), folder.path().join("last.ckpt")).unwrap();
    fs::remove_file(folder.path().join(name(2)).join("meta.pt")).unwrap();
    for step in [8, 10] {
        dcp_testing::copy_folder(&fixtures().join(SOURCE), &folder.path().join(name(step)));
    }
    let last = dcp(["prune", &uri, "--keep-last", "1", "--dry-run", "--json"]).json();
    assert_eq!(deleted(&last), [name(8)]);
    assert!(last["steps"][0].to_string().contains("last.ckpt/meta.pt"), "{last:#}");
}

#[test]
fn nothing_is_deleted_without_a_terminal_or_a_yes() {
    let (_folder, uri) = run(&[1, 2]);
    let before = names(&uri);
    dcp(["prune", &uri, "--keep-last", "1"])
        .fails(2, &["1 checkpoint", "would be deleted", "--yes"]);
    dcp(["prune", &uri, "--keep-last", "1", "--json"]).fails(2, &["would be deleted"]);
    dcp(["prune", &uri]).fails(2, &["no option says which checkpoints are kept"]);
    dcp(["prune", &uri, "--yes"]).fails(2, &["no option says"]);
    dcp(["prune", &uri, "--keep-last", "1", "--yes", "--follow-links"])
        .fails(2, &["follows no links"]);
    dcp(["prune", &format!("{uri}/nowhere"), "--keep-last", "1", "--yes"]).fails(3, &["nowhere"]);
    assert_eq!(names(&uri), before);
    // A plan without deletions needs no confirmation.
    let text = dcp(["prune", &uri, "--keep-last", "2"]).ok();
    assert!(text.contains("0 checkpoints deleted"), "{text}");
}

#[test]
fn pins_and_metrics_keep_checkpoints() {
    let (folder, uri) = run(&[1, 2, 3, 4]);
    for (step, loss) in [(1, 9.0), (2, 0.5), (3, 4.0)] {
        let file = folder.path().join(format!("step-{step}/.dcp-metrics.json"));
        fs::write(file, format!("{{\"metrics\": {{\"eval_loss\": {loss}}}}}")).unwrap();
    }
    dcp(["prune", &uri, "--pin", "3"]).ok();
    let best = ["prune", &uri, "--keep-best", "1", "--metric", "eval_loss", "--json"];
    dcp([&best[..], &["--yes"]].concat()).fails(2, &["that of a loss", "--lowest"]);
    let highest = dcp([&best[..], &["--highest", "--dry-run"]].concat()).json();
    assert_eq!(deleted(&highest), ["step-2"]);
    let lowest = dcp([&best[..], &["--lowest", "--yes"]].concat()).json();
    assert_eq!(deleted(&lowest), ["step-1"]);
    dcp(["prune", &uri, "--pin", "3", "--unpin", "3"]).fails(2, &["--pin 3 and --unpin 3"]);
    dcp(["prune", &uri, "--unpin", "3", "--keep-last", "1", "--yes"]).ok();
    assert_eq!(names(&uri), ["llama-3-8b", "step-4", "train.log"]);
    dcp(["prune", &uri, "--pin", "7"]).fails(3, &["no checkpoint of step 7"]);
    // A pinned checkpoint is read by every command as before.
    dcp(["prune", &uri, "--pin", "4"]).ok();
    dcp(["verify", &format!("{uri}/step-4"), "--deep"]).ok();
}

#[test]
fn a_damaged_newest_checkpoint_keeps_an_older_one() {
    let (folder, uri) = run(&[1, 2, 3]);
    let data = folder.path().join("step-3/__0_0.distcp");
    let mut bytes = fs::read(&data).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&data, bytes).unwrap();
    let args = ["prune", &uri, "--keep-last", "1", "--deep", "--json", "--yes"];
    let done = dcp(args).json();
    assert_eq!(deleted(&done), ["step-1"]);
    assert_eq!(done["skipped"][0]["name"], "step-3");
    assert_eq!(names(&uri), ["llama-3-8b", "step-2", "step-3", "train.log"]);
}

#[test]
fn what_killed_saves_left_goes_when_it_is_old() {
    let (folder, uri) = run(&[1, 2, 3]);
    fs::remove_file(folder.path().join("step-1/.metadata")).unwrap();
    let young = dcp(["prune", &uri, "--incomplete", "--yes", "--json"]).json();
    assert!(deleted(&young).is_empty(), "{young}");
    let old = dcp(["prune", &uri, "--incomplete", "--min-age", "0s", "--yes", "--json"]).json();
    assert_eq!(deleted(&old), ["step-1"]);
    assert!(!Path::new(&uri).join("step-1").exists());
}

#[test]
fn what_dead_writers_left_is_listed_before_it_goes() {
    let (folder, uri) = run(&[1, 2]);
    // A temporary file of a process of another machine.
    let left = "step-1/.dcp-tmp.0123456789abcdef.1.1.0";
    let path = folder.path().join(left);
    fs::write(&path, "half").unwrap();
    let args = ["prune", &uri, "--incomplete"];
    let with = |more: &[&str]| dcp(args.iter().chain(more).copied());
    let listed = |json: &Value| {
        let found = json["leftovers"].as_array().unwrap().clone();
        found.iter().map(|one| one["path"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let young = with(&["--dry-run", "--json"]).json();
    assert_eq!(listed(&young), [""; 0], "it is younger than a day");
    let plan = with(&["--dry-run", "--json", "--min-age", "0s"]).json();
    assert_eq!(listed(&plan), [left]);
    assert_eq!(
        (&plan["leftovers"][0]["kind"], &plan["leftovers"][0]["bytes"]),
        (&Value::from("temporary_file"), &Value::from(4))
    );
    let text = with(&["--dry-run", "--min-age", "0s"]).ok();
    assert!(text.contains(&format!("temporary file  {left}  4 B")), "{text}");
    assert!(text.contains("1 temporary file of dead writers to remove"), "{text}");
    assert!(path.exists(), "a dry run removes nothing");
    let text = with(&["--yes", "--min-age", "0s"]).ok();
    assert!(text.contains(&format!("removed temporary file  {left}  4 B")), "{text}");
    assert!(!path.exists());
    assert_eq!(listed(&with(&["--yes", "--json", "--min-age", "0s"]).json()), [""; 0]);
}

/// Sets the time of the last write of every file in a folder, in seconds since 1970.
fn set_modified(folder: &Path, seconds: u64) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    for entry in fs::read_dir(folder).unwrap() {
        let file = fs::File::options().append(true).open(entry.unwrap().path()).unwrap();
        file.set_modified(time).unwrap();
    }
}

#[test]
fn a_metric_that_is_unknown_keeps_and_one_that_nobody_has_is_refused() {
    let (folder, uri) = run(&[10, 20, 30]);
    let record = |step: u64, text: &str| {
        fs::write(folder.path().join(format!("step-{step}/.dcp-metrics.json")), text).unwrap();
    };
    record(10, "{\"metrics\": {\"acc\": 0.99, \"loss\": NaN}}");
    record(20, "{\"metrics\": {\"acc\": 0.5}}");
    let before = names(&uri);
    let typo = ["prune", &uri, "--keep-best", "2", "--metric", "acc_typo", "--yes"];
    dcp(typo).fails(2, &["no checkpoint of the run has the metric \"acc_typo\"", "\"acc\""]);
    dcp([&typo[..6], &["--dry-run"]].concat()).fails(2, &["acc_typo"]);
    assert_eq!(names(&uri), before);
    let loss = ["prune", &uri, "--keep-best", "1", "--metric", "loss", "--highest", "--yes"];
    dcp(loss).fails(2, &["no checkpoint of the run has the metric \"loss\""]);
    let acc = ["prune", &uri, "--keep-best", "1", "--metric", "acc", "--yes", "--json"];
    assert_eq!(deleted(&dcp(acc).json()), ["step-20"]);
}

#[test]
fn a_run_that_was_started_again_is_not_pruned_without_an_order() {
    let (folder, uri) = run(&[700, 100]);
    set_modified(&folder.path().join("step-700"), 1_000_000_000);
    let listed = dcp(["ls", &uri]);
    let said = "the highest step is not the newest: \"step-700\" is older than \"step-100\"";
    assert!(listed.stderr.contains(said), "{}", listed.stderr);
    let before = names(&uri);
    for last in ["--yes", "--dry-run"] {
        dcp(["prune", &uri, "--keep-last", "1", last]).fails(2, &[said, "--by time", "--by step"]);
    }
    assert_eq!(names(&uri), before);
    let by = |order: &str| {
        dcp(["prune", &uri, "--keep-last", "1", "--by", order, "--dry-run", "--json"])
    };
    assert_eq!(deleted(&by("step").json()), ["step-100"]);
    assert_eq!(deleted(&by("time").json()), ["step-700"]);
    let done = dcp(["prune", &uri, "--keep-last", "1", "--by", "time", "--yes", "--json"]);
    assert_eq!(deleted(&done.json()), ["step-700"]);
    assert!(!dcp(["ls", &uri]).stderr.contains("newest"));
}

#[test]
fn a_prune_that_would_leave_nothing_whole_deletes_nothing() {
    let (folder, uri) = run(&[10, 20, 30]);
    let index = |step: u64| folder.path().join(format!("step-{step}/.metadata"));
    let zeros = vec![0; usize::try_from(fs::metadata(index(10)).unwrap().len()).unwrap()];
    fs::write(index(20), &zeros).unwrap();
    fs::write(index(30), fs::read(index(10)).unwrap()).unwrap();
    let two = dcp(["prune", &uri, "--keep-last", "2", "--yes", "--json"]).json();
    assert_eq!(deleted(&two), [""; 0], "step 20 is not whole: {two}");
    fs::write(index(10), &zeros).unwrap();
    fs::write(index(30), &zeros).unwrap();
    let before = names(&uri);
    for last in ["--yes", "--dry-run"] {
        let failed = dcp(["prune", &uri, "--keep-last", "1", last]);
        failed.fails(1, &["no checkpoint of the run is complete", "step-30: "]);
    }
    assert_eq!(names(&uri), before);
}

#[cfg(unix)]
#[test]
fn a_step_that_has_a_second_name_stays() {
    let (folder, uri) = run(&[20, 30]);
    // The same files, as a mounted folder has them.
    fs::create_dir(folder.path().join("step-10")).unwrap();
    for entry in fs::read_dir(folder.path().join("step-30")).unwrap() {
        let entry = entry.unwrap();
        fs::hard_link(entry.path(), folder.path().join("step-10").join(entry.file_name())).unwrap();
    }
    let plan =
        dcp(["prune", &uri, "--keep-last", "1", "--by", "step", "--dry-run", "--json"]).json();
    assert_eq!(deleted(&plan), ["step-20"]);
    let reason = "its files are those of \"step-30\", which stays";
    assert_eq!(plan["steps"][0]["reason"], reason, "{plan}");
}

#[test]
fn folders_of_every_trainer_are_steps_and_what_is_none_is_said() {
    let (folder, uri) = run(&[]);
    let steps = ["epoch=0-step=10.ckpt", "global_step_20", "ep0-ba30", "step40-unsharded"];
    for name in steps {
        dcp_testing::copy_folder(&fixtures().join(SOURCE), &folder.path().join(name));
    }
    let done = dcp(["prune", &uri, "--keep-last", "2", "--yes"]);
    let said =
        "2 files and folders that are no checkpoints of steps stay: \"llama-3-8b\", \"train.log\"";
    assert!(done.stderr.contains(said), "{}", done.stderr);
    assert!(done.ok().contains("2 checkpoints deleted"));
    assert_eq!(names(&uri), ["ep0-ba30", "llama-3-8b", "step40-unsharded", "train.log"]);
    let plan = dcp(["prune", &uri, "--keep-last", "2", "--dry-run", "--json"]).json();
    assert_eq!(plan["others"], serde_json::json!(["llama-3-8b", "train.log"]));
}

#[test]
fn a_dry_run_of_what_killed_saves_left_is_what_goes() {
    // A data file is missing.
    let (folder, uri) = run(&[10, 20]);
    fs::remove_file(folder.path().join("step-10/__0_0.distcp")).unwrap();
    let args = ["prune", &uri, "--incomplete", "--min-age", "0s", "--json"];
    let planned = dcp([&args[..], &["--dry-run"]].concat()).json();
    assert_eq!(deleted(&planned), ["step-10"]);
    let done = dcp([&args[..], &["--yes"]].concat()).json();
    assert_eq!(done["deleted"][0]["name"], "step-10", "{done}");
    assert!(!folder.path().join("step-10").exists());

    // An iteration beyond the tracker of Megatron-LM, whose save lost a file.
    let run = tempfile::tempdir().unwrap();
    let beyond = iterations(run.path(), "run_torch_dist_dp2", &[10, 20]).remove(1);
    fs::remove_file(beyond.join("__1_0.distcp")).unwrap();
    let uri = run.path().display().to_string();
    let args = ["prune", &uri, "--incomplete", "--min-age", "0s", "--json"];
    let planned = dcp([&args[..], &["--dry-run"]].concat()).json();
    assert_eq!(deleted(&planned), ["iter_0000020"]);
    let done = dcp([&args[..], &["--yes"]].concat()).json();
    assert_eq!(done["deleted"][0]["name"], "iter_0000020", "{done}");
    assert!(!beyond.exists());
}

/// Iterations that are copies of the one of a run of Megatron-LM, whose tracker is at 10.
fn iterations(run: &Path, source: &str, steps: &[u64]) -> Vec<PathBuf> {
    let megatron = fixtures().join("../megatron").join(source);
    fs::write(run.join("latest_checkpointed_iteration.txt"), "10").unwrap();
    let folders = steps.iter().map(|step| {
        let folder = run.join(format!("iter_{step:07}"));
        dcp_testing::copy_folder(&megatron.join("iter_0000010"), &folder);
        folder
    });
    folders.collect()
}

#[test]
fn a_whole_iteration_beyond_the_tracker_is_no_rest_of_a_save() {
    let args = |uri: &str| -> Vec<String> {
        ["prune", uri, "--incomplete", "--min-age", "0s", "--yes"].map(str::to_owned).to_vec()
    };
    for source in
        ["run_torch_dist_dp2", "run_torch_dist_v019", "run_legacy_torch_tp2", "run_torch_dcp"]
    {
        // Training went on from iteration 10, which is damaged where `ls` does not look.
        let run = tempfile::tempdir().unwrap();
        let folders = iterations(run.path(), source, &[10, 20, 30]);
        for folder in &folders {
            dcp(["verify", &folder.display().to_string()]).ok();
        }
        let uri = run.path().display().to_string();
        dcp(args(&uri)).ok();
        for folder in &folders {
            assert!(folder.is_dir(), "{source}: {}", folder.display());
        }
        let planned = dcp(["prune", &uri, "--incomplete", "--min-age", "0s", "--dry-run"]);
        assert!(
            planned.stdout.contains("the tracker of the run is at an earlier one"),
            "{planned:?}"
        );
    }
}

#[cfg(unix)]
#[test]
fn a_folder_that_cannot_go_is_said_and_what_is_gone_is_counted() {
    let (folder, uri) = run(&[10, 20]);
    let fifo = folder.path().join("step-10/pipe");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    if !made.is_ok_and(|made| made.success()) {
        eprintln!("SKIPPED: no mkfifo");
        return;
    }
    let done = dcp(["prune", &uri, "--keep-last", "1", "--yes"]);
    let said = "the folder of step-10 is still there: it holds links, or what is no regular file";
    assert!(done.stderr.contains(said), "{}", done.stderr);
    assert!(done.ok().contains("1 checkpoint deleted"));
    assert_eq!(fs::read_dir(folder.path().join("step-10")).unwrap().count(), 1);
}

#[test]
fn a_file_and_a_missing_run_are_errors_as_of_ls() {
    let (folder, uri) = run(&[1]);
    let file = folder.path().join("train.log").display().to_string();
    let nowhere = format!("{uri}/nowhere");
    for (place, exit, said) in [(&file, 2, "is a file"), (&nowhere, 3, "there is nothing at")] {
        dcp(["ls", place]).fails(exit, &[said]);
        dcp(["prune", place, "--keep-last", "1", "--yes"]).fails(exit, &[said]);
        dcp(["prune", place, "--pin", "1"]).fails(exit, &[said]);
    }
    let step = format!("{uri}/step-1");
    for policy in [&["--keep-last", "1"][..], &["--incomplete", "--min-age", "0s"]] {
        let args = ["prune", &*step, "--yes"].into_iter().chain(policy.iter().copied());
        dcp(args).fails(2, &["is no directory of a run", "has the steps of the run"]);
    }
    assert!(folder.path().join("step-1/.metadata").exists());
}

/// A step of a transformers trainer in `run`: a model, and the state of the trainer.
fn trainer_step(run: &Path, name: &str, best: &str) {
    let (folder, source) = (run.join(name), fixtures().join(SOURCE).display().to_string());
    let at = |file: &str| folder.join(file).display().to_string();
    dcp(["-q", "convert", &source, &at(""), "--to", "hf", "--everything"]).ok();
    dcp(["-q", "convert", &source, &at("optimizer.pt"), "--to", "torch-save"]).ok();
    let state = serde_json::json!({ "best_model_checkpoint": best, "log_history": [] });
    fs::write(at("trainer_state.json"), state.to_string()).unwrap();
}

fn pruned(run: &Path) -> Vec<String> {
    let uri = run.display().to_string();
    dcp(["prune", &uri, "--keep-last", "1", "--by", "step", "--yes"]).ok();
    names(&uri)
}

#[test]
fn a_save_that_died_between_two_files_is_not_the_newest() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["checkpoint-10", "checkpoint-20", "checkpoint-30"] {
        trainer_step(folder.path(), name, "");
    }
    fs::remove_file(folder.path().join("checkpoint-30/optimizer.pt")).unwrap();
    let uri = folder.path().display().to_string();
    let text = dcp(["prune", &uri, "--keep-last", "1", "--by", "step", "--dry-run"]).ok();
    assert!(text.contains("unknown"), "{text}");
    assert_eq!(pruned(folder.path()), ["checkpoint-20", "checkpoint-30"]);
}

#[test]
fn a_state_of_the_trainer_that_cannot_be_read_loses_no_best_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["checkpoint-10", "checkpoint-20", "checkpoint-30", "checkpoint-40"] {
        trainer_step(folder.path(), name, "run/checkpoint-10");
    }
    fs::write(folder.path().join("checkpoint-40/trainer_state.json"), "{\"best_mo").unwrap();
    let all = ["checkpoint-10", "checkpoint-20", "checkpoint-30", "checkpoint-40"];
    let uri = folder.path().display().to_string();
    let done = dcp(["prune", &uri, "--keep-last", "1", "--by", "step", "--yes"]);
    let said = "note: no complete checkpoint is deleted, as any may be the best one: \
                \"checkpoint-40/trainer_state.json\" cannot be parsed; a newer state";
    assert_eq!(done.stderr.matches("trainer_state.json").count(), 1, "{}", done.stderr);
    assert!(done.stderr.contains(said), "{}", done.stderr);
    assert_eq!(names(&uri), all);
    // The state of the whole run is written last.
    let state = "{\"global_step\": 40, \"best_model_checkpoint\": \"run/checkpoint-10\"}";
    fs::write(folder.path().join("trainer_state.json"), state).unwrap();
    let kept = ["checkpoint-10", "checkpoint-30", "checkpoint-40", "trainer_state.json"];
    assert_eq!(pruned(folder.path()), kept);
}

#[test]
fn data_files_of_zeros_are_no_checkpoint() {
    let (folder, uri) = run(&[10, 20, 30]);
    for file in
        fs::read_dir(folder.path().join("step-30")).unwrap().map(|file| file.unwrap().path())
    {
        if file.extension().is_some_and(|ending| ending == "distcp") {
            let len = fs::metadata(&file).unwrap().len();
            fs::write(&file, vec![0; usize::try_from(len).unwrap()]).unwrap();
        }
    }
    dcp(["prune", &uri, "--keep-last", "1", "--by", "step", "--yes"]).ok();
    assert_eq!(names(&uri), ["llama-3-8b", "step-20", "step-30", "train.log"]);
}

#[test]
fn a_folder_that_was_never_renamed_is_not_the_newest() {
    for temporary in ["tmp-checkpoint-30", "step-30_tmp", "step-30.tmp"] {
        let (folder, uri) = run(&[10, 20, 30]);
        fs::rename(folder.path().join("step-30"), folder.path().join(temporary)).unwrap();
        dcp(["prune", &uri, "--keep-last", "1", "--by", "step", "--yes"]).ok();
        let left = names(&uri);
        assert!(left.iter().any(|name| name == "step-20"), "{temporary}: {left:?}");
        assert!(left.iter().any(|name| name == temporary), "{left:?}");
    }
}

#[test]
fn what_a_killed_overwrite_left_beside_a_model_does_not_make_it_incomplete() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("checkpoint-20");
    let source = fixtures().join("fsdp2_adam_2r").display().to_string();
    let shown = model.display().to_string();
    dcp(["-q", "convert", &source, &shown, "--to", "hf", "--max-shard-size", "1000"]).ok();
    let shards = fs::read_dir(&model).unwrap().map(|file| file.unwrap().path());
    let shard = shards.into_iter().find(|file| file.to_string_lossy().contains("-00001-of-"));
    fs::copy(shard.unwrap(), model.join("model-g1-00001-of-00010.safetensors")).unwrap();
    dcp(["verify", &shown]).ok();
    let listed = dcp(["ls", "--json", &folder.path().display().to_string()]).json();
    assert_eq!(listed["entries"][0]["complete"], true, "{listed:#}");
}
