//! `dcp prune` of a run on disk.

use std::fs;
use std::path::Path;

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
    let highest = dcp([&best[..], &["--dry-run"]].concat()).json();
    assert_eq!(deleted(&highest), ["step-2"]);
    let lowest = dcp([&best[..], &["--lowest", "--yes"]].concat()).json();
    assert_eq!(deleted(&lowest), ["step-1"]);
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
