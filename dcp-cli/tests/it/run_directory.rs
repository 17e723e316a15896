//! Directories of training runs: `ls`, and commands on a step or on the run itself.

use std::fs;

use serde_json::json;
use tempfile::TempDir;

use crate::support::{dcp, fixtures, path};

/// A run of OLMo-core with a step 3, a step 10 and a step 11 whose asynchronous save failed.
fn run_of_olmo() -> TempDir {
    let run = tempfile::tempdir().unwrap();
    let olmo = fixtures().join("../olmo");
    for step in ["step3", "step10", "step11"] {
        dcp_testing::copy_folder(&olmo.join("trainer/step3"), &run.path().join(step));
        let model = olmo.join("fsdp2-2rank-bf16-modelonly/ckpt");
        dcp_testing::copy_folder(&model, &run.path().join(step).join("model_and_optim"));
    }
    fs::remove_file(run.path().join("step11/model_and_optim/.metadata")).unwrap();
    fs::write(
        run.path().join("step10/.metadata.json"),
        r#"{"ephemeral": false, "version": "3.0.0"}"#,
    )
    .unwrap();
    fs::write(run.path().join("train.log"), "").unwrap();
    run
}

#[test]
fn a_run_is_listed() {
    let run = run_of_olmo();
    let uri = path(&run, "");
    let text = dcp(["ls", &uri]).ok();
    let lines: Vec<&str> = text.lines().collect();
    let starts = [
        "NAME    KIND       STATE",
        "step3   OLMo step  complete",
        "step10  OLMo step  complete",
        "step11  OLMo step  incomplete",
        "  there is no model_and_optim/.metadata: the save did not finish, although",
        "",
        "3 checkpoints, 2 of them complete",
    ];
    assert_eq!(lines.len(), starts.len(), "{text}");
    for (line, start) in lines.iter().zip(starts) {
        assert!(line.starts_with(start), "{text}");
    }
    assert!(lines[1].ends_with("ephemeral") && lines[2].ends_with("latest"), "{text}");

    let listing = dcp(["ls", &uri, "--json"]).json();
    assert_eq!([&listing["latest"], &listing["other"]], [&json!("step10"), &json!(1)]);
    let step3 = &listing["entries"][0];
    assert_eq!(step3["checkpoint"], "step3/model_and_optim");
    assert_eq!([&step3["ephemeral"], &step3["version"]], [&json!(true), &json!("3.0.0")]);
    assert!(step3["modified"].as_u64().unwrap() > 1_600_000_000);
}

#[test]
fn a_step_is_the_checkpoint_in_it() {
    let run = run_of_olmo();
    let (step, model) = (path(&run, "step10"), path(&run, "step10/model_and_optim"));
    let inspected = dcp(["inspect", &step, "--json"]).json();
    assert_eq!(inspected, dcp(["inspect", &model, "--json"]).json());
    assert_eq!(inspected["keys"].as_object().unwrap().len(), 14);
    dcp(["verify", &step, "--deep"]).ok();
    // Said of the step as of its folder.
    let dry = dcp(["rewrite-metadata", &step, "--to", "torch", "--dry-run"]).ok();
    assert!(dry.contains("from olmo-torch2.15 to compat"), "{dry}");
}

#[test]
fn a_run_is_its_latest_complete_step() {
    let run = run_of_olmo();
    let uri = path(&run, "");
    let opened = dcp(["inspect", &uri, "--json"]);
    let said = "is a run of OLMo-core; opening step10, the last complete one";
    assert!(opened.stderr.contains(said), "{}", opened.stderr);
    assert_eq!(opened.json(), dcp(["inspect", &path(&run, "step10"), "--json"]).json());
    let failed = path(&run, "step11");
    dcp(["verify", &failed]).fails(1, &["is not a checkpoint"]);
    for step in ["step3", "step10"] {
        fs::remove_file(run.path().join(step).join("train/rank0.pt")).unwrap();
    }
    let none = ["no checkpoint of the run", "step11: there is no", "hint: `dcp ls`"];
    dcp(["inspect", &uri]).fails(1, &none);
}

#[test]
fn there_may_be_nothing_to_list() {
    let empty = tempfile::tempdir().unwrap();
    let uri = path(&empty, "");
    assert!(dcp(["ls", &uri]).ok().contains("no checkpoints"));
    dcp(["ls", &path(&empty, "nowhere")]).fails(3, &["there is nothing at"]);
    let listing = dcp(["ls", fixtures().to_str().unwrap(), "--json"]).json();
    let entries = listing["entries"].as_array().unwrap();
    let unfinished = entries.iter().filter(|entry| entry["complete"] != true);
    assert_eq!(unfinished.count(), 0, "{entries:?}");
    assert!(entries.len() > 30, "{}", entries.len());
}

#[test]
fn a_linked_part_of_a_step_is_named() {
    let (step, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (part, fixture) in [
        (step.path().join("pytorch_model_fsdp_0"), "t21_plain"),
        (outside.path().join("optimizer"), "fsdp2_adam_2r"),
    ] {
        dcp_testing::copy_folder(&fixtures().join(fixture), &part);
    }
    let link = step.path().join("optimizer_0");
    std::os::unix::fs::symlink(outside.path().join("optimizer"), link).unwrap();
    let listed = dcp(["ls", &path(&step, "")]);
    assert!(listed.stderr.contains("note: not looking into \"optimizer_0\""), "{}", listed.stderr);
    let listing = dcp(["ls", &path(&step, ""), "--json"]).json();
    assert!(listing["unread"]["optimizer_0"].is_string(), "{listing:#}");
}

/// As NeMo Automodel writes it: the files of ranks, and the whole model in a folder beside them.
#[test]
fn a_stray_file_hides_no_model_in_a_folder_below_and_a_consolidated_model_is_examined() {
    let run = tempfile::tempdir().unwrap();
    let step = run.path().join("epoch_0_step_2");
    let model = step.join("model");
    dcp_testing::copy_folder(&fixtures().join("../hf/sharded_2r/ckpt"), &model);
    dcp_testing::copy_folder(
        &fixtures().join("../hf/consolidated_index_4r/ckpt"),
        &model.join("consolidated"),
    );
    let entry = || {
        let listing = dcp(["ls", "--json", &path(&run, "")]).json();
        listing["entries"].as_array().unwrap().first().cloned().unwrap_or_default()
    };
    let whole = entry();
    assert_eq!(whole["name"], "epoch_0_step_2/model", "{whole:#}");
    assert_eq!(whole["complete"], true, "{whole:#}");
    let other = fixtures().join("../torch_save/t21/zip.pt");
    fs::copy(other, step.join("notes.pt")).unwrap();
    assert_eq!(entry()["name"], "epoch_0_step_2/model");
    let mut shards = fs::read_dir(model.join("consolidated")).unwrap();
    let shard = shards.find_map(|one| {
        let path = one.unwrap().path();
        path.extension().is_some_and(|ending| ending == "safetensors").then_some(path)
    });
    fs::remove_file(shard.unwrap()).unwrap();
    let lost = entry();
    assert_eq!(lost["complete"], serde_json::Value::Null, "{lost:#}");
    assert!(lost["problem"].as_str().unwrap().starts_with("consolidated: "), "{lost:#}");
    let uri = model.display().to_string();
    dcp(["inspect", &uri]).not_whole(&["consolidated"]);
    assert_eq!(dcp(["verify", &uri]).code, 1);
}
