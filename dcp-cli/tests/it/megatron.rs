//! Checkpoints of Megatron-Core and runs of Megatron-LM, as the commands show and check them.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::megatron_convert::tensors_of;
use crate::support::{dcp, fixtures, path, read_json};

pub(crate) fn megatron(name: &str) -> String {
    fixtures().join("../megatron").join(name).display().to_string()
}

/// A copy of a fixture's folder that may be changed.
pub(crate) fn copy(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    dcp_testing::copy_folder(megatron(name).as_ref(), folder.path());
    folder
}

#[test]
fn inspect_says_what_it_is() {
    let found = dcp(["inspect", &megatron("gpt_tp2pp2_swiglu/ckpt"), "--json"]).json();
    assert_eq!(found["format"], "megatron_torch_dist");
    let megatron = &found["megatron"];
    assert_eq!(megatron["format"], "torch_dist");
    assert_eq!(megatron["common_place"], "common.pt");
    assert_eq!([&megatron["iteration"], &megatron["consumed_samples"]], [7, 56]);
    assert_eq!(megatron["parallel"]["tensor"], 2);
    assert_eq!(megatron["parallel"]["pipeline"], 2);
    assert_eq!(
        megatron["layers"],
        json!({ "decoder.layers": { "count": 2, "axis": 0, "tensors": 6 } })
    );
    assert_eq!(megatron["objects"]["rng_state"]["grid"], json!([2, 2]));
    assert_eq!(megatron["objects"]["rng_state"]["stored"], 4);
    assert_eq!(found["keys"]["rng_state/shard_1.0_2.2"]["kind"], "object");
    assert_eq!(found["keys"]["decoder.layers.mlp.linear_fc1.weight"]["shape"], json!([2, 24, 8]));
}

#[test]
fn inspect_groups_objects_and_fits_the_terminal() {
    let source = megatron("gpt_tp2pp2_swiglu/ckpt");
    let mut command = crate::support::command();
    command.env("COLUMNS", "80").args(["inspect", &source]);
    let text = crate::support::finish(command.output().unwrap()).ok();
    for line in [
        "format     torch_dist, common state in common.pt",
        "parallel   TP 2 · PP 2 · DP 1 · 4 ranks",
        "layers     decoder.layers: 2, on axis 0 of 6 tensors",
        "4 objects on a grid of 2×2",
        "2 objects on a grid of 2, 2.5 KiB, all None",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    assert!(!text.contains("shard_1.0_2.2"), "{text}");
    let all = dcp(["inspect", &source, "--all"]).ok();
    assert!(all.contains("shard_1.0_2.2") || all.contains("0_2.2"), "{all}");
}

#[test]
fn the_common_state_is_shown_on_request() {
    let run = megatron("run_torch_dist_dp2");
    let expected = read_json(&Path::new(&run).join("expected.json"));
    let wanted = expected["common"]["args"]["__namespace__"].as_object().unwrap();
    let args = dcp(["inspect", &run, "--args", "--json"]).json();
    let args = args.as_object().unwrap();
    assert_eq!(args.len(), wanted.len());
    for (name, value) in wanted.iter().filter(|(_, value)| value.is_number()) {
        assert_eq!(&args[name], value, "{name}");
    }
    let text = dcp(["inspect", &run, "--args"]).ok();
    assert_eq!(text.lines().count(), wanted.len());
    assert!(text.lines().is_sorted(), "{text}");
    let common = dcp(["inspect", &run, "--common"]).ok();
    assert!(common.contains("opt_param_scheduler.max_lr"), "{common}");
    assert!(common.contains("656 arguments; --args lists them"), "{common}");
    dcp(["inspect", "fsdp2_adam_2r", "--args"])
        .fails(2, &["`dcp inspect --args` is for checkpoints of Megatron"]);
}

#[test]
fn every_age_opens_everywhere() {
    for fixture in ["head020_basic_integrity/ckpt", "v06_basic_torch21/ckpt", "v015_flattened/ckpt"]
    {
        let source = megatron(fixture);
        let found = dcp(["inspect", &source, "--json"]).json();
        assert!(found["keys"].get("common_state").is_some(), "{fixture}");
        let files = found["files"].as_object().unwrap();
        assert!(files.values().all(Value::is_number), "{fixture}: {files:?}");
        dcp(["verify", &source, "--deep"]).ok();
        dcp(["diff", &source, &source]).ok();
    }
}

#[test]
fn folders_of_ranks_are_one_model() {
    let run = megatron("run_legacy_torch_tp2");
    let found = dcp(["inspect", &run, "--json"]).json();
    assert_eq!(found["format"], "megatron_torch");
    assert_eq!(found["megatron"]["parallel"]["tensor"], 2);
    assert_eq!(found["keys"]["decoder.layers.mlp.linear_fc1.weight"]["shape"], json!([1, 24, 8]));
    let verified = dcp(["verify", &run, "--deep"]).ok();
    assert!(verified.contains("iter_0000010 (megatron_torch)"), "{verified}");
    let folder = tempfile::tempdir().unwrap();
    let out = path(&folder, "out");
    let args = ["--to", "torch-dist", "--optimizer", "per-parameter"];
    dcp(["-q", "convert", &run, &out].iter().copied().chain(args)).ok();
    let written = dcp(["inspect", &out, "--json"]).json();
    assert_eq!(written["megatron"]["optimizer"], "fully_reshardable");
    let damaged = copy("run_legacy_torch_tp2");
    let file = damaged.path().join("iter_0000010/mp_rank_01/model_optim_rng.pt");
    fs::write(&file, "no archive").unwrap();
    dcp(["-q", "convert", &path(&damaged, ""), &path(&folder, "x.pt")]).fails(1, &["mp_rank_01"]);
}

#[test]
fn a_run_is_its_latest_complete_iteration() {
    let run = copy("run_torch_dist_dp2");
    let uri = path(&run, "");
    let listed = dcp(["ls", &uri, "--json"]).json();
    assert_eq!(listed["latest"], "iter_0000010");
    let opened = dcp(["inspect", &uri]);
    assert!(opened.stderr.contains("opening iter_0000010, which the tracker names"));
    let step = dcp(["inspect", &path(&run, "iter_0000010"), "--json"]).json();
    assert_eq!(dcp(["inspect", &uri, "--json"]).json(), step);

    // A later one that was not finished, and a tracker that is wrong.
    dcp_testing::copy_folder(&run.path().join("iter_0000010"), &run.path().join("iter_0000020"));
    fs::remove_file(run.path().join("iter_0000020/metadata.json")).unwrap();
    for (tracker, said) in [
        ("20", "iter_0000020, which the tracker names, is not complete: there is no metadata.json"),
        ("30", "iter_0000030, which the tracker names, does not exist"),
        ("ten", "neither an iteration nor \"release\""),
    ] {
        fs::write(run.path().join("latest_checkpointed_iteration.txt"), tracker).unwrap();
        let opened = dcp(["inspect", &uri, "--json"]);
        assert!(opened.stderr.contains(said), "{}", opened.stderr);
        assert!(opened.stderr.contains("opening iter_0000010"), "{}", opened.stderr);
        let text = opened.not_whole(&["latest_checkpointed_iteration.txt"]);
        let mut found: Value = serde_json::from_str(&text).unwrap();
        assert!(found.as_object_mut().unwrap().remove("problem").is_some());
        assert_eq!(found, step);
    }
    fs::remove_dir_all(run.path().join("iter_0000010")).unwrap();
    dcp(["inspect", &uri]).fails(1, &["no checkpoint of the run", "hint: `dcp ls`"]);
}

#[test]
fn shifted_optimizer_state_is_found() {
    let bad = megatron("gpt_fully_reshardable_multibucket_CORRUPT/ckpt");
    for deep in [&[] as &[&str], &["--deep"]] {
        let run = dcp(["verify", &bad, "--json"].iter().chain(deep));
        assert_eq!(run.code, 1, "{}", run.stderr);
        let report: Value = serde_json::from_str(&run.stdout).unwrap();
        let problems = report["problems"].as_array().unwrap();
        let named = |key: &str| problems.iter().any(|problem| problem["key"] == key);
        assert!(named("optimizer.state.param.embedding.word_embeddings.weight"), "{report}");
        let notes = report["notes"].to_string();
        assert!(notes.contains("--repair-optimizer"), "{notes}");
    }
    dcp(["verify", &megatron("head020_fully_reshardable_multibucket/ckpt"), "--deep"]).ok();
}

#[test]
fn looking_at_shifted_optimizer_state_says_that_it_is() {
    let bad = megatron("gpt_fully_reshardable_multibucket_CORRUPT/ckpt");
    let sound = megatron("head020_fully_reshardable_multibucket/ckpt");
    let folder = tempfile::tempdir().unwrap();
    let moment = "optimizer.state.exp_avg.embedding.word_embeddings.weight";
    let weight = "embedding.word_embeddings.weight";
    let page = path(&folder, "report.html");
    let said = |args: &[&str]| dcp(args).stderr.contains("is damaged");
    for (uri, damaged) in [(&bad, true), (&sound, false)] {
        assert_eq!(said(&["get", uri, moment]), damaged);
        assert_eq!(said(&["stats", uri]), damaged);
        assert_eq!(said(&["stats", uri, moment]), damaged);
        assert_eq!(said(&["report", uri, "-o", &page, "--stats", "--overwrite"]), damaged);
        assert_eq!(said(&["diff", &sound, uri]), damaged);
        // What is shown is sound.
        assert!(!said(&["get", uri, weight]));
        assert!(!said(&["stats", uri, "--filter", weight]));
        assert!(!said(&["diff", uri, &sound, "--no-optimizer"]));
        assert!(!said(&["diff", uri, &sound, "--include", weight]));
        assert!(!said(&["diff", uri, &sound, "--keys-only"]));
        assert!(!said(&["-q", "stats", uri]));
    }
}

#[test]
fn a_flat_optimizer_begins_anew_by_parameter() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in ["gpt_dp2_dp_reshardable/ckpt", "run_legacy_torch_tp2"] {
        let (flat, out) = (megatron(fixture), path(&folder, "out"));
        let convert = ["-q", "convert", &flat, &out, "--to", "torch-dist", "--repair-optimizer"];
        dcp(convert).fails(1, &["does not name the parameters", "--optimizer per-parameter"]);
        dcp(convert.iter().chain(&["--optimizer", "per-parameter", "--overwrite"])).ok();
        let all = tensors_of(&out);
        let moments = all.iter().filter(|(name, _)| name.starts_with("optimizer.state.exp_avg"));
        let zero = moments.map(|(_, (_, _, bytes))| bytes.iter().all(|byte| *byte == 0));
        assert_eq!(zero.collect::<Vec<_>>(), [true; 16], "{fixture}");
    }
}

#[test]
fn bad_checkpoints_are_refused_in_words() {
    let bad = |file: &str, bytes: &[u8], code: i32, said: &[&str]| {
        let folder = copy("tp2_basic/ckpt");
        fs::write(folder.path().join(file), bytes).unwrap();
        let (source, out) = (path(&folder, ""), tempfile::tempdir().unwrap());
        dcp(["convert", &source, &path(&out, "x.pt")]).fails(code, said);
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0, "nothing was written");
    };
    bad("metadata.json", b"", 1, &["metadata.json", "it is empty"]);
    bad("metadata.json", b"{", 1, &["metadata.json"]);
    let newer = br#"{"sharded_backend": "torch_dist", "sharded_backend_version": 2}"#;
    bad("metadata.json", newer, 1, &["\"torch_dist\" version 2"]);
    let other = br#"{"sharded_backend": "tensorstore"}"#;
    bad("metadata.json", other, 1, &["\"tensorstore\""]);
    bad("common.pt", b"no archive", 1, &["common.pt"]);

    // A metadata.json that promises what is not there.
    let folder = copy("tp2_basic/ckpt");
    fs::remove_file(folder.path().join(".metadata")).unwrap();
    dcp(["inspect", &path(&folder, "")]).fails(1, &["metadata.json says", "there is no .metadata"]);

    // None at all: what is there is a checkpoint of PyTorch whose save did not finish.
    let folder = copy("tp2_basic/ckpt");
    fs::remove_file(folder.path().join("metadata.json")).unwrap();
    let found = dcp(["inspect", &path(&folder, ""), "--json"]);
    assert!(found.stderr.contains("no metadata.json"), "{}", found.stderr);
    let found: Value = serde_json::from_str(&found.not_whole(&["metadata.json"])).unwrap();
    assert_eq!(found["format"], "torch_dcp");
    let verified = dcp(["verify", &path(&folder, "")]);
    assert_eq!(verified.code, 1, "{}", verified.stdout);
    assert!(verified.stdout.contains("the save did not finish"), "{}", verified.stdout);
}

#[test]
fn files_of_other_programs_are_no_marker() {
    let folder = tempfile::tempdir().unwrap();
    let hf = path(&folder, "hf");
    dcp(["convert", "nested", &hf, "--to", "hf", "--everything"]).ok();
    fs::write(folder.path().join("hf/metadata.json"), "{\"license\": \"mit\"}").unwrap();
    assert_eq!(dcp(["inspect", &hf, "--json"]).json()["format"], "hf");
}

#[test]
fn parts_of_a_checkpoint_are_no_target() {
    let folder = copy("tp2_basic/ckpt");
    let source = path(&folder, "");
    for file in ["common.pt", "metadata.json", "__0_0.distcp"] {
        let target = path(&folder, file);
        dcp(["convert", &source, &target, "--to", "torch-save", "--overwrite"])
            .fails(2, &["is a file of the source"]);
    }
    let run = copy("run_torch_dist_dp2");
    let iteration = path(&run, "iter_0000010");
    dcp(["-q", "reshard", &path(&run, ""), &iteration, "-n", "2", "--overwrite"])
        .fails(2, &["source and target are the same"]);
}

#[test]
fn a_checkpoint_is_its_own_torch_save() {
    let out = tempfile::tempdir().unwrap();
    for name in ["gpt_tp2pp2_swiglu/ckpt", "head020_basic_integrity/ckpt"] {
        let (source, file) = (megatron(name), path(&out, "all.pt"));
        dcp(["convert", &source, &file, "--overwrite"]).ok();
        for (a, b) in [(&source, &file), (&file, &source)] {
            let found = dcp(["diff", a, b, "--json"]).json();
            assert_eq!(found["differences"], json!([]), "{name}");
            assert_eq!(found["compared"]["keys_a"], found["compared"]["keys_b"]);
        }
    }
}

#[test]
fn the_format_has_one_name_everywhere() {
    for (name, format) in [
        ("gpt_tp2pp2_swiglu/ckpt", "megatron_torch_dist"),
        ("v09_zarr/ckpt", "megatron_zarr"),
        ("run_legacy_torch_tp2", "megatron_torch"),
    ] {
        let uri = megatron(name);
        for command in ["inspect", "verify", "stats", "report"] {
            assert_eq!(dcp([command, &uri, "--json"]).json()["format"], format, "{command}");
        }
    }
}
