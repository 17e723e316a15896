//! What `dcp prune` keeps because it does not know all of it: links, damaged notes, whole models in damaged steps.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;

use dcp::core::Key;
use dcp::core::metadata::{Entry, FileId};
use dcp::formats::metadata::{Profile, decode, encode};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{dcp, fixtures, path};

const LFS: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";

fn copy(fixture: &str, to: &Path) {
    dcp_testing::copy_folder(&fixtures().join(fixture), to);
}

/// A whole model of one file, with its configuration and a tokenizer.
fn model(to: &Path) {
    let source = fixtures().join("t21_plain").display().to_string();
    dcp(["convert", "-q", &source, &to.display().to_string(), "--to", "hf", "--everything"]).ok();
    fs::write(to.join("config.json"), "{\"model_type\": \"llama\"}").unwrap();
    fs::write(to.join("tokenizer.json"), "{\"model\": {}}").unwrap();
}

/// A run of such models.
fn models(steps: &[u64]) -> TempDir {
    let run = tempfile::tempdir().unwrap();
    steps.iter().for_each(|step| model(&run.path().join(format!("checkpoint-{step}"))));
    run
}

fn dcp_run(steps: &[u64]) -> TempDir {
    let run = tempfile::tempdir().unwrap();
    steps.iter().for_each(|step| copy("fsdp2_adam_2r", &run.path().join(format!("step-{step}"))));
    run
}

/// The steps that a prune with these options deletes, the plan, and what it leaves.
fn pruned(run: &TempDir, options: &[&str]) -> (Vec<String>, Value) {
    let uri = path(run, "");
    let args = [&["prune", &uri, "--by", "step", "--json"], options].concat();
    let plan = dcp([&args[..], &["--dry-run"]].concat()).json();
    let steps = plan["steps"].as_array().unwrap().iter().filter(|one| one["delete"] == true);
    let planned: Vec<_> = steps.map(|one| one["name"].as_str().unwrap().to_owned()).collect();
    let done = dcp([&args[..], &["--yes"]].concat()).json();
    let gone = done["deleted"].as_array().unwrap().iter();
    let gone: Vec<_> = gone.map(|one| one["name"].as_str().unwrap().to_owned()).collect();
    assert_eq!(planned, gone, "{plan:#}");
    for name in &gone {
        assert!(!run.path().join(name).exists(), "{name}");
    }
    (gone, plan)
}

fn incomplete(run: &TempDir) -> (Vec<String>, Value) {
    pruned(run, &["--incomplete", "--min-age", "0s"])
}

fn last(run: &TempDir) -> (Vec<String>, Value) {
    pruned(run, &["--keep-last", "1"])
}

fn reason(plan: &Value, name: &str) -> String {
    let steps = plan["steps"].as_array().unwrap();
    let step = steps.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{plan:#}"));
    step["reason"].as_str().unwrap().to_owned()
}

/// Puts a link out of the run in the place of a file.
fn link_out(file: &Path, outside: &TempDir) {
    let to = outside.path().join(file.file_name().unwrap());
    fs::rename(file, &to).unwrap();
    symlink(to, file).unwrap();
}

#[test]
fn a_step_with_a_link_that_leads_out_is_unknown_and_stays() {
    for (fixture, file) in [
        ("fsdp2_adam_2r", ".metadata"),
        ("fsdp2_adam_2r", "__1_0.distcp"),
        ("no_collectives_2r", "__0.metadata"),
        ("../hf/sharded_2r/ckpt", "shard"),
        ("../megatron/tp2_basic/ckpt", "metadata.json"),
        ("../megatron/tp2_basic/ckpt", "common.pt"),
        ("../megatron/run_legacy_torch_tp2/iter_0000010", "mp_rank_00/model_optim_rng.pt"),
    ] {
        let (run, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        copy(fixture, &run.path().join("step-10"));
        copy(fixture, &run.path().join("step-20"));
        let step = run.path().join("step-10");
        let mut linked = step.join(file);
        if !linked.exists() {
            let mut files = fs::read_dir(&step).unwrap().map(|file| file.unwrap().path());
            let is_it = |path: &std::path::PathBuf| {
                path.file_name().unwrap().to_str().unwrap().starts_with(file)
            };
            linked = files.find(is_it).unwrap();
        }
        link_out(&linked, &outside);
        let (gone, plan) = incomplete(&run);
        assert_eq!(gone, [""; 0], "{fixture} {file}: {plan:#}");
        assert!(reason(&plan, "step-10").contains("unknown"), "{file}: {plan:#}");
        let listing = dcp(["ls", "--json", &path(&run, "")]).json();
        assert_eq!(listing["entries"][0]["complete"], Value::Null, "{file}: {listing:#}");
    }
}

#[test]
fn a_step_with_links_into_another_one_is_not_the_newest() {
    // By a folder that is no step, and directly.
    for direct in [false, true] {
        let run = models(&[10, 20, 30]);
        let weights = run.path().join("checkpoint-30/model.safetensors");
        fs::remove_file(&weights).unwrap();
        if direct {
            symlink("../checkpoint-10/model.safetensors", &weights).unwrap();
        } else {
            fs::create_dir(run.path().join("blobs")).unwrap();
            symlink("../checkpoint-10/model.safetensors", run.path().join("blobs/m")).unwrap();
            symlink("../blobs/m", &weights).unwrap();
        }
        let listing = dcp(["ls", "--json", &path(&run, "")]).json();
        assert_eq!(listing["latest"], "checkpoint-20");
        let (gone, plan) = last(&run);
        assert_eq!(gone, [""; 0], "{plan:#}");
        assert_eq!(reason(&plan, "checkpoint-20"), "the newest complete one");
        assert!(reason(&plan, "checkpoint-10").contains("lead"), "{plan:#}");
        assert!(weights.exists());
    }
}

#[test]
fn links_of_the_whole_run_protect_the_steps_that_they_lead_to() {
    let chains: [&[(&str, &str)]; 6] = [
        &[("best/model.safetensors", "../checkpoint-10/model.safetensors")],
        &[("final/config.json", "../checkpoint-10/config.json")],
        &[("a/b/deploy", "../../checkpoint-10")],
        &[("best", "hub/snap"), ("hub/snap", "../checkpoint-10")],
        // A chain through a folder that is a link, and a step that is no checkpoint.
        &[("deploy/weights", "../best/model.safetensors"), ("best", "checkpoint-10")],
        &[("checkpoint-99/model.txt", "../checkpoint-10/model.safetensors")],
    ];
    for chain in chains {
        let run = models(&[10, 20, 30]);
        for (link, target) in chain {
            let link = run.path().join(link);
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(target, link).unwrap();
        }
        // A loop leads nowhere.
        symlink("loop", run.path().join("loop")).unwrap();
        let (gone, plan) = last(&run);
        assert_eq!(gone, ["checkpoint-20"], "{chain:?}: {plan:#}");
        assert!(reason(&plan, "checkpoint-10").contains("lead"), "{chain:?}: {plan:#}");
    }
}

#[test]
fn a_file_that_is_no_mark_of_a_deletion_deletes_nothing() {
    for mark in ["", "{\"format\": \"dc", "{}", "[1]", "{\"format\": \"x\", \"note\": \"\"}"] {
        let run = dcp_run(&[10]);
        fs::write(run.path().join("step-10/.dcp-deleting"), mark).unwrap();
        let (gone, plan) = incomplete(&run);
        assert_eq!(gone, [""; 0], "{mark}: {plan:#}");
        assert_eq!(plan["steps"][0]["complete"], true, "{mark}: {plan:#}");
        let (gone, _) = last(&run);
        assert_eq!(gone, [""; 0], "{mark}");
    }
}

#[test]
fn a_broken_step_with_a_whole_checkpoint_inside_stays() {
    let run = models(&[10, 20]);
    fs::write(run.path().join("checkpoint-10/model.safetensors"), "").unwrap();
    model(&run.path().join("checkpoint-10/checkpoint-500"));
    let (gone, plan) = incomplete(&run);
    assert_eq!(gone, [""; 0], "{plan:#}");
    let said = "\"checkpoint-10/checkpoint-500\" in it is a whole checkpoint";
    assert_eq!(reason(&plan, "checkpoint-10"), said);
    // Neither one that is broken, too, nor the state of the optimizer protects it.
    copy("fsdp2_adam_2r", &run.path().join("checkpoint-10/optimizer_0"));
    fs::write(run.path().join("checkpoint-10/checkpoint-500/model.safetensors"), "").unwrap();
    assert_eq!(incomplete(&run).0, ["checkpoint-10"]);
    // The whole model of a step of accelerate protects it, and its whole optimizer does not.
    let run = tempfile::tempdir().unwrap();
    for step in ["checkpoint-10", "checkpoint-20"] {
        copy("t21_plain", &run.path().join(step).join("pytorch_model_fsdp_0"));
        copy("fsdp2_adam_2r", &run.path().join(step).join("optimizer_0"));
    }
    fs::remove_file(run.path().join("checkpoint-10/optimizer_0/.metadata")).unwrap();
    let (gone, plan) = incomplete(&run);
    assert_eq!(gone, [""; 0], "{plan:#}");
    let said = "\"checkpoint-10/pytorch_model_fsdp_0\" in it is a whole checkpoint";
    assert_eq!(reason(&plan, "checkpoint-10"), said);
    copy("fsdp2_adam_2r", &run.path().join("checkpoint-10/optimizer_0"));
    let part = run.path().join("checkpoint-10/pytorch_model_fsdp_0");
    fs::remove_file(part.join(".metadata")).unwrap();
    // A folder whose name only begins in the same way may have a model.
    copy("t21_plain", &run.path().join("checkpoint-10/optimized"));
    assert_eq!(incomplete(&run).0, [""; 0]);
    fs::remove_dir_all(run.path().join("checkpoint-10/optimized")).unwrap();
    assert_eq!(incomplete(&run).0, ["checkpoint-10"]);
}

/// Files of ranks have no index.
#[test]
fn a_stray_file_is_no_reason_to_delete_a_model_without_an_index() {
    let zeros = "\0".repeat(64);
    for (file, bytes) in [("done.pt", ""), ("data/mask.bin", &*zeros), ("x.ckpt", "PK\x03\x04 cut")]
    {
        let run = tempfile::tempdir().unwrap();
        let step = run.path().join("checkpoint-10");
        copy("../hf/sharded_2r/ckpt", &step);
        copy("../hf/sharded_2r/ckpt", &run.path().join("checkpoint-20"));
        fs::create_dir_all(step.join(file).parent().unwrap()).unwrap();
        fs::write(step.join(file), bytes).unwrap();
        let (gone, plan) = incomplete(&run);
        assert_eq!(gone, [""; 0], "{file}: {plan:#}");
        assert_eq!(reason(&plan, "checkpoint-10"), "its model is whole", "{file}");
        fs::write(step.join("shard-00002-model-00001-of-00001.safetensors"), "cut").unwrap();
        assert_eq!(incomplete(&run).0, ["checkpoint-10"], "{file}");
    }
}

#[test]
fn a_stray_file_is_no_reason_to_delete_a_whole_model() {
    let zeros = "\0".repeat(64);
    for (file, bytes) in [
        ("runs/events.ckpt", ""),
        ("onnx/model.bin", &*zeros),
        ("sub/x/y.safetensors", "cut"),
        (".tmp1.safetensors", ""),
        ("optimizer.pt", "PK\x03\x04 cut"),
    ] {
        let run = models(&[10, 20]);
        let stray = run.path().join("checkpoint-10").join(file);
        fs::create_dir_all(stray.parent().unwrap()).unwrap();
        fs::write(stray, bytes).unwrap();
        let listing = dcp(["ls", "--json", &path(&run, "")]).json();
        assert_eq!(listing["entries"][0]["complete"], false, "{file}: {listing:#}");
        let (gone, plan) = incomplete(&run);
        assert_eq!(gone, [""; 0], "{file}: {plan:#}");
        assert_eq!(reason(&plan, "checkpoint-10"), "its model is whole", "{file}");
        fs::write(run.path().join("checkpoint-10/model.safetensors"), "cut").unwrap();
        assert_eq!(incomplete(&run).0, ["checkpoint-10"], "{file}");
    }
}

#[test]
fn a_newest_model_without_a_usable_configuration_keeps_the_one_before_it() {
    let zeros = "\0".repeat(24);
    for file in ["config.json", "tokenizer.json"] {
        for bytes in [None, Some(""), Some(&*zeros), Some("{\"model"), Some(LFS)] {
            let run = models(&[10, 20, 30]);
            let damaged = run.path().join("checkpoint-30").join(file);
            match bytes {
                Some(bytes) => fs::write(damaged, bytes).unwrap(),
                None => fs::remove_file(damaged).unwrap(),
            }
            let (gone, plan) = last(&run);
            assert_eq!(gone, ["checkpoint-10"], "{file} {bytes:?}: {plan:#}");
            assert_eq!(reason(&plan, "checkpoint-20"), "the newest complete one");
            assert!(reason(&plan, "checkpoint-30").contains(file), "{plan:#}");
        }
    }
}

#[test]
fn a_newest_step_without_the_file_of_a_rank_of_deepspeed_is_not_whole() {
    let run_of = || {
        let run = models(&[10, 20, 30]);
        for step in [10, 20, 30] {
            let folder = run.path().join(format!("checkpoint-{step}"));
            let states = folder.join(format!("global_step{step}"));
            copy("../deepspeed/z2_bf16_w2/ckpt/global_step2", &states);
            fs::write(folder.join("latest"), format!("global_step{step}")).unwrap();
        }
        run
    };
    assert_eq!(last(&run_of()).0, ["checkpoint-10", "checkpoint-20"]);
    let run = run_of();
    let rank = "checkpoint-30/global_step30/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt";
    fs::remove_file(run.path().join(rank)).unwrap();
    let (gone, plan) = last(&run);
    assert_eq!(gone, ["checkpoint-10"], "{plan:#}");
    let run = run_of();
    fs::write(run.path().join("checkpoint-30/latest"), "global_step31").unwrap();
    let (gone, plan) = last(&run);
    assert_eq!(gone, ["checkpoint-10"], "{plan:#}");
    assert!(reason(&plan, "checkpoint-30").contains("\"global_step31\""), "{plan:#}");
}

#[test]
fn a_file_that_may_name_the_best_step_and_cannot_be_read_keeps_all() {
    let long = format!("{{\"pad\": \"{}\"}}", "x".repeat(70_000));
    let invalid = b"\xff\xfecheckpoint".to_vec();
    for (file, bytes) in
        [("best.json", long.into_bytes()), ("best", invalid.clone()), ("latest", invalid)]
    {
        let run = dcp_run(&[10, 20, 30]);
        fs::write(run.path().join(file), bytes).unwrap();
        let (gone, plan) = last(&run);
        assert_eq!(gone, [""; 0], "{file}: {plan:#}");
        assert!(plan["unclear_notes"].to_string().contains(file), "{plan:#}");
    }
    // More than are read.
    let run = dcp_run(&[10, 20, 30]);
    (0..65).for_each(|at| fs::write(run.path().join(format!("best{at}.txt")), "x").unwrap());
    assert_eq!(last(&run).0, [""; 0]);
    // The last checkpoint of Lightning, and a note, that are outside of the run.
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("file"), b"\x80\x02\xff").unwrap();
    for link in ["last.ckpt", "best.json"] {
        let run = dcp_run(&[10, 20, 30]);
        symlink(outside.path().join("file"), run.path().join(link)).unwrap();
        let (gone, plan) = last(&run);
        assert_eq!(gone, [""; 0], "{link}: {plan:#}");
    }
    // Weights and logs of such names are no notes.
    let run = dcp_run(&[10, 20, 30]);
    fs::write(run.path().join("latest.log"), "10 20 30 text\n".repeat(10_000)).unwrap();
    fs::write(run.path().join("best_model.pt"), vec![0xff; 100_000]).unwrap();
    assert_eq!(last(&run).0, ["step-10", "step-20"]);
}

#[test]
fn a_step_that_a_file_names_by_its_number_stays() {
    let padded = json!({ "pad": "x".repeat(10_000), "path": "out/step-10" }).to_string();
    for text in ["{\"step\": 10}", "{\"best\":{\"global_step\":10,\"loss\":0.5}}", &padded] {
        let run = dcp_run(&[10, 20, 30]);
        fs::write(run.path().join("best.json"), text).unwrap();
        let (gone, plan) = last(&run);
        assert_eq!(gone, ["step-20"], "{plan:#}");
        assert_eq!(reason(&plan, "step-10"), "\"best.json\" names it");
    }
    for name in ["BEST", ".best", "Best.txt", ".latest"] {
        let run = dcp_run(&[10, 20, 30]);
        fs::write(run.path().join(name), "step-10").unwrap();
        assert_eq!(last(&run).0, ["step-20"], "{name}");
    }
}

/// Moves the tensors of an optimizer into data files of its own, as programs with a file for each item have it.
fn divide(step: &Path) {
    let index = step.join(".metadata");
    let mut metadata = decode(&fs::read(&index).unwrap()).unwrap();
    let mut others: Vec<FileId> = Vec::new();
    for (at, file) in metadata.files().to_vec().into_iter().enumerate() {
        let name = format!("__{at}_1.distcp");
        fs::copy(step.join(file.as_str()), step.join(&name)).unwrap();
        others.push(metadata.intern_file(&Key::new(name).unwrap()).unwrap());
    }
    let names: Vec<String> = metadata.iter().map(|(fqn, _)| fqn.to_string()).collect();
    for fqn in names.iter().filter(|fqn| fqn.starts_with("optimizer.")) {
        let Entry::Tensor(tensor) = metadata.get_mut(fqn).unwrap() else { continue };
        for at in 0..tensor.chunks.len() {
            let mut placement = tensor.chunks.get(at).unwrap().placement.unwrap();
            placement.file = others[placement.file.index()];
            tensor.chunks.place(at, placement);
        }
    }
    fs::write(index, encode(&metadata, Profile::default()).unwrap()).unwrap();
}

#[test]
fn a_step_whose_model_still_converts_stays_when_files_of_its_optimizer_are_lost() {
    for bytes in [None, Some("cut")] {
        let run = dcp_run(&[10, 20]);
        let step = run.path().join("step-10");
        divide(&step);
        let lose = |name: &str| match bytes {
            None => fs::remove_file(step.join(name)).unwrap(),
            Some(bytes) => fs::write(step.join(name), bytes).unwrap(),
        };
        dcp(["verify", "--deep", &path(&run, "step-10")]).ok();
        lose("__1_1.distcp");
        let out = tempfile::tempdir().unwrap();
        dcp(["-q", "convert", &path(&run, "step-10"), &path(&out, "hf"), "--to", "hf"]).ok();
        let (gone, plan) = incomplete(&run);
        assert_eq!(gone, [""; 0], "{plan:#}");
        let said = "its model still opens";
        assert_eq!(reason(&plan, "step-10"), said);
        assert_eq!(last(&run).0, [""; 0]);
        // Neither a part of the model nor a save without its index is kept.
        let index = fs::read(step.join(".metadata")).unwrap();
        fs::remove_file(step.join(".metadata")).unwrap();
        let listing = dcp([
            "prune",
            &path(&run, ""),
            "--incomplete",
            "--min-age",
            "0s",
            "--dry-run",
            "--json",
        ])
        .json();
        assert_eq!(listing["steps"][0]["delete"], true, "{listing:#}");
        fs::write(step.join(".metadata"), index).unwrap();
        lose("__1_0.distcp");
        assert_eq!(incomplete(&run).0, ["step-10"]);
    }
}

/// Names on a file system are bytes.
#[test]
fn a_link_in_a_folder_whose_name_is_no_text_protects_its_step() {
    for folder in ["", "final/"] {
        let run = dcp_run(&[10, 20, 30]);
        let folder = run.path().join(folder).join(OsStr::from_bytes(b"links\xff"));
        fs::create_dir_all(&folder).unwrap();
        symlink(run.path().canonicalize().unwrap().join("step-10"), folder.join("best")).unwrap();
        let args = ["prune", &path(&run, ""), "--by", "step", "--keep-last", "1", "--yes"];
        dcp(args);
        assert!(run.path().join("step-10/.metadata").exists(), "{}", folder.display());
    }
}
