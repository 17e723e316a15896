//! Checkpoints of Megatron-Core that are not what they say, or of which something is gone.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::megatron::{copy, megatron};
use crate::support::{dcp, path};

const MODEL: &str = "gpt_tp2pp2_swiglu/ckpt";

/// Expects that it cannot be made a checkpoint of Megatron-Core, and that nothing is written.
#[track_caller]
fn no_conversion(folder: &TempDir, said: &[&str]) {
    let out = tempfile::tempdir().unwrap();
    let target = path(&out, "out");
    dcp(["-q", "convert", &path(folder, ""), &target, "--to", "torch-dist"]).fails(1, said);
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0, "nothing was written");
}

#[track_caller]
fn bad(uri: &str, more: &[&str], said: &str) {
    let run = dcp(["verify", uri].iter().chain(more));
    assert_eq!(run.code, 1, "{}{}", run.stdout, run.stderr);
    let all = format!("{}{}", run.stdout, run.stderr);
    assert!(all.contains(said), "{said:?} is not in\n{all}");
}

#[test]
fn a_format_that_is_not_the_one_of_the_files_is_refused() {
    let folder = copy(MODEL);
    let zarr = r#"{"sharded_backend": "zarr", "sharded_backend_version": 1}"#;
    fs::write(folder.path().join("metadata.json"), zarr).unwrap();
    no_conversion(&folder, &["says that this is a checkpoint of \"zarr\""]);
    bad(&path(&folder, ""), &[], "no array");
    let folder = copy("v09_zarr/ckpt");
    let torch_dist = r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 1}"#;
    fs::write(folder.path().join("metadata.json"), torch_dist).unwrap();
    no_conversion(&folder, &["there is no .metadata"]);
}

#[test]
fn a_description_that_says_nothing_does_not_cost_the_common_state() {
    for json in ["[1,2]", "3", "{}", "{\"license\": \"mit\"}"] {
        let folder = copy(MODEL);
        fs::write(folder.path().join("metadata.json"), json).unwrap();
        no_conversion(&folder, &["metadata.json"]);
        bad(&path(&folder, ""), &[], "metadata.json");
    }
}

#[test]
fn a_save_that_did_not_finish_does_not_become_one_that_did() {
    let folder = copy(MODEL);
    fs::remove_file(folder.path().join("metadata.json")).unwrap();
    no_conversion(&folder, &["no metadata.json", "hint: take another iteration"]);
    let out = tempfile::tempdir().unwrap();
    let (uri, target) = (path(&folder, ""), path(&out, "out"));
    dcp(["-q", "reshard", &uri, &target, "-n", "2"]).fails(1, &["no metadata.json"]);
    dcp(["-q", "convert", &uri, &target, "--to", "dcp"]).fails(1, &["no metadata.json"]);
    // The tensors can be rescued.
    dcp(["convert", &uri, &path(&out, "x.safetensors")]).ok();
}

#[test]
fn so_it_is_where_the_common_state_is_inside() {
    const INSIDE: &str = "head020_basic_integrity/ckpt";
    let folder = copy(INSIDE);
    let uri = path(&folder, "");
    fs::remove_file(folder.path().join("metadata.json")).unwrap();
    let listed = dcp(["ls", &uri, "--json"]).json();
    assert_eq!(listed["entries"][0]["complete"], false, "{listed}");
    no_conversion(&folder, &["a common_state", "no metadata.json"]);
    fs::remove_file(folder.path().join("integrity.json")).unwrap();
    no_conversion(&folder, &["a common_state", "no metadata.json", "hint: take another"]);
    bad(&uri, &["--deep"], "no metadata.json");
    let hint = dcp(["convert", &uri, "out", "--to", "torch-dist"]).stderr;
    let config = fs::read_to_string(Path::new(&megatron(INSIDE)).join("metadata.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let hint = &hint[hint.find('{').unwrap()..=hint.rfind('}').unwrap()];
    assert_eq!(serde_json::from_str::<Value>(hint).unwrap(), config);
}

#[test]
fn an_array_that_nothing_describes_is_a_problem() {
    let folder = copy("v06_zarr/ckpt");
    let uri = path(&folder, "");
    fs::remove_file(folder.path().join("u8/.zarray")).unwrap();
    bad(&uri, &[], "u8/.zarray");
    no_conversion(&folder, &["u8/.zarray", "parts of an array"]);
    let shown = dcp(["inspect", &uri]);
    assert!(shown.stderr.contains("u8/.zarray"), "{}", shown.stderr);
    shown.not_whole(&["u8/.zarray"]);
}

#[test]
fn a_common_state_that_cannot_be_had_is_a_problem() {
    let file = |folder: &TempDir| folder.path().join("common.pt");
    let folder = copy(MODEL);
    fs::write(file(&folder), "").unwrap();
    bad(&path(&folder, ""), &[], "common.pt");
    fs::remove_file(file(&folder)).unwrap();
    bad(&path(&folder, ""), &["--json", "--deep"], "\"ok\": false");
    let folder = copy(MODEL);
    let mut bytes = fs::read(file(&folder)).unwrap();
    let third = bytes.len() / 3;
    bytes[third] ^= 0xff;
    fs::write(file(&folder), bytes).unwrap();
    bad(&path(&folder, ""), &[], "CRC-32");
}

#[test]
fn a_manifest_is_checked() {
    const SOURCE: &str = "head020_basic_integrity/ckpt";
    let manifest = |folder: &TempDir| folder.path().join("integrity.json");
    let folder = copy(SOURCE);
    fs::write(manifest(&folder), "no json").unwrap();
    bad(&path(&folder, ""), &[], "bad integrity manifest");
    let folder = copy(SOURCE);
    let text = fs::read_to_string(manifest(&folder)).unwrap();
    let gone = text.replace("\"files\": {", "\"files\": {\"gone\": \"00\", ");
    assert_ne!(gone, text);
    fs::write(manifest(&folder), gone).unwrap();
    bad(&path(&folder, ""), &[], "integrity.json names it, but it does not exist");
    let folder = copy(SOURCE);
    let mut json: Value = serde_json::from_str(&text).unwrap();
    json["files"]["__0_0.distcp"] = "00".repeat(32).into();
    fs::write(manifest(&folder), json.to_string()).unwrap();
    dcp(["verify", &path(&folder, "")]).ok();
    bad(&path(&folder, ""), &["--deep"], "its SHA-256 begins with");
}

#[test]
fn a_tracker_that_is_wrong_is_a_problem_and_one_that_is_not_there_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let source = megatron("run_torch_dist_dp2/iter_0000010");
    let run = |name: &str| folder.path().join("run").join(name);
    dcp_testing::copy_folder(Path::new(&source), &run("iter_0000010"));
    let uri = path(&folder, "run");
    let tracker = run("latest_checkpointed_iteration.txt");
    for (text, said) in [("77", "does not exist"), ("ten", "neither an iteration nor")] {
        fs::write(&tracker, text).unwrap();
        bad(&uri, &[], said);
    }
    fs::write(&tracker, "10").unwrap();
    dcp(["verify", &uri]).ok();
    fs::remove_file(&tracker).unwrap();
    dcp(["verify", &uri]).ok();
    let found = dcp(["inspect", &uri, "--json"]);
    assert!(found.stderr.contains("opening iter_0000010"), "{}", found.stderr);
    fs::rename(run("iter_0000010"), run("release")).unwrap();
    let found = dcp(["inspect", &uri, "--json"]);
    assert!(found.stderr.contains("opening release"), "{}", found.stderr);
    assert_eq!(found.json()["format"], "megatron_torch_dist");
}

#[test]
fn iterations_that_are_not_whole_are_listed_so() {
    let folder = tempfile::tempdir().unwrap();
    for step in 1..=4 {
        dcp_testing::copy_folder(
            megatron(MODEL).as_ref(),
            &folder.path().join(format!("iter_000000{step}")),
        );
    }
    fs::write(folder.path().join("iter_0000002/metadata.json"), "").unwrap();
    fs::remove_file(folder.path().join("iter_0000003/common.pt")).unwrap();
    fs::write(folder.path().join("iter_0000004/.metadata"), "").unwrap();
    let listed = dcp(["ls", &path(&folder, ""), "--json"]).json();
    let entries = listed["entries"].as_array().unwrap().iter();
    let complete: Vec<_> = entries.map(|entry| entry["complete"] == true).collect();
    assert_eq!(complete, [true, false, false, false], "{listed}");
    assert_eq!(listed["latest"], "iter_0000001");
    for whole in ["run_torch_dist_dp2", "run_legacy_torch_tp2"] {
        let listed = dcp(["ls", &megatron(whole), "--json"]).json();
        let entries = listed["entries"].as_array().unwrap();
        let step = entries.iter().find(|entry| entry["name"] == "iter_0000010").unwrap();
        assert_eq!(step["complete"], true, "{step}");
    }
}

#[test]
fn keys_that_are_chosen_bring_the_common_state() {
    let out = tempfile::tempdir().unwrap();
    let (source, target) = (megatron(MODEL), path(&out, "out"));
    let include = ["--include", "embedding", "--to", "torch-dist"];
    dcp(["convert", &source, &target].iter().copied().chain(include)).ok();
    let all = dcp(["inspect", &source, "--args", "--json"]).json();
    assert_eq!(dcp(["inspect", &target, "--args", "--json"]).json(), all);
}

#[test]
fn what_is_typed_almost_right_is_answered() {
    let source = megatron(MODEL);
    for command in
        [["inspect", &source, "--shards", "rng_state"].as_slice(), &["get", &source, "rng_state"]]
    {
        dcp(command).fails(2, &["did you mean \"rng_state/shard_0.0_2.2\""]);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.pt");
    fs::write(&file, "").unwrap();
    dcp(["convert", &source, &file, "--to", "torch-dist", "--overwrite"])
        .fails(2, &["is a file, and a directory is to be written"]);
}
