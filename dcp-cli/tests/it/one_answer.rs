//! `ls`, `inspect`, `verify`, `copy` and `prune` say the same of a checkpoint: of variants, pointers of Git
//! LFS, steps without their commit, links, trackers, and folders of several runs.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{dcp, fixtures, path};

const LFS: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";

fn copy(fixture: &str, to: &Path) {
    dcp_testing::copy_folder(&fixtures().join(fixture), to);
}

fn model(to: &Path, options: &[&str]) {
    let source = fixtures().join("fsdp2_adam_2r").display().to_string();
    let to = to.display().to_string();
    dcp([&["convert", "-q", &source, &to, "--to", "hf"], options].concat()).ok();
}

/// A sharded model whose files and index have the names of a variant.
fn variant(to: &Path) {
    model(to, &["--max-shard-size", "1000"]);
    let index = to.join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap().replace("\"model-", "\"model.fp16-");
    fs::write(to.join("model.safetensors.index.fp16.json"), text).unwrap();
    fs::remove_file(index).unwrap();
    for entry in fs::read_dir(to).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if let Some(rest) = name.strip_prefix("model-") {
            fs::rename(to.join(&name), to.join(format!("model.fp16-{rest}"))).unwrap();
        }
    }
}

fn entry(run: &str, name: &str) -> Value {
    let listing = dcp(["ls", "--json", run]).json();
    let entries = listing["entries"].as_array().unwrap();
    entries.iter().find(|entry| entry["name"] == name).cloned().unwrap_or_default()
}

#[test]
fn a_model_of_variants_is_listed_as_whole_and_not_pruned() {
    let run = tempfile::tempdir().unwrap();
    for name in ["checkpoint-1", "checkpoint-2"] {
        variant(&run.path().join(name));
    }
    let uri = path(&run, "");
    assert_eq!(entry(&uri, "checkpoint-1")["complete"], true);
    dcp(["prune", &uri, "--incomplete", "--min-age", "0s", "--yes"]).ok();
    assert!(run.path().join("checkpoint-1").exists());
    let step = path(&run, "checkpoint-1");
    dcp(["verify", "--deep", &step]).ok();
    dcp(["inspect", &step]).ok();
    let lost = run.path().join("checkpoint-1/model.fp16-00002-of-00002.safetensors");
    fs::remove_file(lost).unwrap();
    let said = entry(&uri, "checkpoint-1")["problem"].to_string();
    assert!(said.contains("model.fp16-00002-of-00002.safetensors is missing"), "{said}");
    assert_eq!(dcp(["verify", &step]).code, 1);
    // Beside a whole model, what is left of a variant is no reason to delete the model.
    model(&run.path().join("checkpoint-1"), &[]);
    assert_eq!(entry(&uri, "checkpoint-1")["complete"], Value::Null);
    assert_eq!(dcp(["verify", &step]).code, 1);
    dcp(["prune", &uri, "--incomplete", "--min-age", "0s", "--yes"]).ok();
    dcp(["prune", &uri, "--keep-last", "1", "--yes"]).ok();
    assert!(run.path().join("checkpoint-1/model.safetensors").exists());
    fs::write(run.path().join("checkpoint-1/model.safetensors"), b"cut").unwrap();
    assert_eq!(entry(&uri, "checkpoint-1")["complete"], false);
}

#[test]
fn inspect_shows_what_is_there_and_fails_where_something_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    copy("fsdp2_adam_2r", &folder.path().join("dcp"));
    model(&folder.path().join("hf"), &[]);
    for (name, file) in [("dcp", "__1_0.distcp"), ("hf", "model.safetensors")] {
        let (uri, file_at) = (path(&folder, name), folder.path().join(name).join(file));
        dcp(["inspect", &uri]).ok();
        let whole = fs::read(&file_at).unwrap();
        for (bytes, said) in [
            (Some(&whole[..whole.len() / 2]), "bytes"),
            (Some(LFS.as_bytes()), "is a pointer of Git LFS"),
            (None, file),
        ] {
            match bytes {
                Some(bytes) => fs::write(&file_at, bytes).unwrap(),
                None => fs::remove_file(&file_at).unwrap(),
            }
            if name == "hf" && bytes.is_none() {
                dcp(["inspect", &uri]).fails(1, &[]);
                continue;
            }
            let text = dcp(["inspect", &uri]).not_whole(&[said]);
            assert!(name == "hf" || text.contains("weight"), "{text}");
            let found = dcp(["inspect", "--json", &uri]).not_whole(&[said]);
            let found: Value = serde_json::from_str(&found).unwrap();
            assert!(found["problem"].as_str().unwrap().contains(said), "{found}");
        }
        fs::write(&file_at, &whole).unwrap();
        let found = dcp(["inspect", "--json", &uri]).json();
        assert_eq!(found.get("problem"), None);
    }
}

#[test]
fn every_command_calls_a_pointer_of_git_lfs_a_pointer() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    copy("fsdp2_adam_2r", &at("dcp"));
    model(&at("hf"), &[]);
    model(&at("shards"), &["--max-shard-size", "1000"]);
    copy("../megatron/tp2_basic/ckpt", &at("megatron"));
    copy("../megatron/run_legacy_torch_tp2/iter_0000010", &at("legacy"));
    for (name, file) in [
        ("dcp", ".metadata"),
        ("dcp", "__0_0.distcp"),
        ("hf", "model.safetensors"),
        ("shards", "model.safetensors.index.json"),
        ("shards", "model-00002-of-00002.safetensors"),
        ("megatron", "metadata.json"),
        ("megatron", "common.pt"),
        ("megatron", ".metadata"),
        ("legacy", "mp_rank_00/model_optim_rng.pt"),
    ] {
        let (uri, target) = (path(&folder, name), path(&folder, "target"));
        let whole = fs::read(at(name).join(file)).unwrap();
        fs::write(at(name).join(file), LFS).unwrap();
        for command in [
            vec!["inspect", &uri],
            vec!["verify", &uri],
            vec!["stats", &uri],
            vec!["diff", &uri, &uri],
            vec!["convert", &uri, &target, "--to", "safetensors"],
            vec!["ls", &uri],
        ] {
            let run = dcp(command.iter());
            let said = format!("{}{}", run.stdout, run.stderr).replace("\n  ", " ");
            assert!(said.contains("Git LFS"), "{name} {file}: {command:?}\n{said}");
            assert!(command[0] == "ls" || run.code != 0, "{name} {file}: {command:?}\n{said}");
            assert!(!at("target").exists(), "{name} {file}: {command:?}");
        }
        fs::write(at(name).join(file), whole).unwrap();
    }
}

#[test]
fn a_step_of_olmo_without_its_commit_is_not_whole_for_any_command() {
    let run = tempfile::tempdir().unwrap();
    let step = run.path().join("step3");
    copy("../olmo/trainer/step3", &step);
    copy("../olmo/fsdp2-2rank-bf16-modelonly/ckpt", &step.join("model_and_optim"));
    let (uri, target) = (path(&run, "step3"), path(&run, "target"));
    dcp(["verify", &uri]).ok();
    fs::remove_file(step.join(".metadata.json")).unwrap();
    let said = "there is no .metadata.json";
    assert_eq!(entry(&path(&run, ""), "step3")["complete"], false);
    dcp(["inspect", &uri]).not_whole(&[said]);
    let verified = dcp(["verify", &uri]);
    assert!(verified.code == 1 && verified.stdout.contains(said), "{}", verified.stdout);
    dcp(["copy", &uri, &target]).fails(1, &["not a whole checkpoint", said]);
    let target = path(&run, "converted");
    let convert = ["convert", &uri, &target, "--to", "dcp"];
    dcp(convert).fails(1, &[said]);
    for text in ["", "[]", "\0\0\0\0", "{\"ephemeral\":", LFS] {
        fs::write(step.join(".metadata.json"), text).unwrap();
        assert_eq!(dcp(["verify", &uri]).code, 1, "{text:?}");
        dcp(convert).fails(1, &["is not whole", ".metadata.json"]);
        assert!(!run.path().join("converted").exists(), "{text:?}");
    }
}

#[test]
fn a_run_of_verl_is_not_one_of_megatron() {
    let run = tempfile::tempdir().unwrap();
    fs::write(run.path().join("latest_checkpointed_iteration.txt"), "10").unwrap();
    let actor = run.path().join("global_step_10/actor");
    fs::create_dir_all(&actor).unwrap();
    let source = fixtures().join("fsdp2_adam_2r").display().to_string();
    let file = actor.join("model_world_size_1_rank_0.pt").display().to_string();
    dcp(["convert", "-q", &source, &file]).ok();
    for command in ["inspect", "verify"] {
        for at in ["", "global_step_10", "global_step_10/actor"] {
            let run = dcp([command, &path(&run, at)]);
            assert_eq!(run.code, 0, "{}", run.stderr);
            assert!(!(run.stdout + &run.stderr).contains("Megatron"));
        }
    }
    fs::remove_file(&file).unwrap();
    dcp(["inspect", &path(&run, "")]).fails(1, &[]);
}

#[test]
fn the_parts_of_a_checkpoint_of_accelerate_are_verified_together() {
    let run = tempfile::tempdir().unwrap();
    let step = run.path().join("checkpoint-5");
    copy("t21_plain", &step.join("pytorch_model_fsdp_0"));
    copy("fsdp2_adam_2r", &step.join("optimizer_0"));
    let (uri, all) = (path(&run, "checkpoint-5"), path(&run, ""));
    assert_eq!(entry(&all, "checkpoint-5")["complete"], true);
    dcp(["verify", &uri]).ok();
    dcp(["verify", "--deep", &uri]).ok();
    let file = step.join("optimizer_0/__1_0.distcp");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, &bytes).unwrap();
    let damaged = dcp(["verify", "--deep", &uri]);
    assert_eq!(damaged.code, 1, "{}", damaged.stdout);
    assert!(damaged.stdout.contains("optimizer_0/__1_0.distcp"), "{}", damaged.stdout);
    fs::remove_file(&file).unwrap();
    assert_eq!(entry(&all, "checkpoint-5")["complete"], false);
    assert_eq!(dcp(["verify", &uri]).code, 1);
    dcp(["inspect", &uri]).not_whole(&["optimizer_0"]);
}

#[test]
fn a_link_that_a_reader_refuses_is_named_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    model(&run.join("checkpoint-1"), &[]);
    let weights = folder.path().join("weights.safetensors");
    fs::rename(run.join("checkpoint-1/model.safetensors"), &weights).unwrap();
    symlink(&weights, run.join("checkpoint-1/model.safetensors")).unwrap();
    copy("fsdp2_adam_2r", &run.join("step-10"));
    copy("fsdp2_adam_2r", &run.join("step-20"));
    fs::remove_file(run.join("step-20/__1_0.distcp")).unwrap();
    symlink("../step-10/__1_0.distcp", run.join("step-20/__1_0.distcp")).unwrap();
    let uri = path(&folder, "run");
    assert_eq!(entry(&uri, "step-10")["complete"], true);
    for (name, file) in [("checkpoint-1", "model.safetensors"), ("step-20", "__1_0.distcp")] {
        let listed = entry(&uri, name);
        assert_eq!(listed["complete"], Value::Null, "{listed}");
        let said = listed["problem"].as_str().unwrap();
        assert!(said.contains(file) && said.contains("symbolic link"), "{said}");
        let step = path(&folder, &format!("run/{name}"));
        for command in ["verify", "inspect"] {
            dcp([command, &step]).fails(2, &[file, "symbolic link", "--follow-links"]);
            dcp([command, &step, "--follow-links"]).ok();
        }
        let (target, refused) =
            (path(&folder, "target"), [file, "symbolic link", "--follow-links"]);
        dcp(["convert", &step, &target, "--to", "dcp"]).fails(2, &refused);
        dcp(["stats", &step]).fails(2, &refused);
        let own = dcp(["ls", &step]).ok();
        assert!(own.contains("symbolic link"), "{own}");
    }
    // Of a model without an index, the shards that are there look like all.
    let ranks = run.join("checkpoint-3");
    copy("../hf/sharded_2r/ckpt", &ranks);
    let mut shards: Vec<_> = fs::read_dir(&ranks).unwrap().map(|one| one.unwrap().path()).collect();
    shards.retain(|shard| shard.extension().is_some_and(|ending| ending == "safetensors"));
    shards.sort();
    let (last, moved) = (shards.last().unwrap(), folder.path().join("shard"));
    fs::rename(last, &moved).unwrap();
    symlink(&moved, last).unwrap();
    let (step, target) = (path(&folder, "run/checkpoint-3"), path(&folder, "target"));
    let refused = ["shard-", "symbolic link", "--follow-links"];
    dcp(["convert", &step, &target, "--to", "dcp"]).fails(2, &refused);
    assert!(!Path::new(&target).exists());
    let listing = dcp(["ls", &uri, "--json", "--follow-links"]).json();
    let entries = listing["entries"].as_array().unwrap();
    assert!(entries.iter().all(|entry| entry["complete"] == true), "{listing}");
}

#[test]
fn a_damaged_tracker_or_manifest_is_no_whole_checkpoint_for_any_command() {
    let run = tempfile::tempdir().unwrap();
    copy("../megatron/run_torch_dist_dp2", run.path());
    let (uri, tracker) = (path(&run, ""), run.path().join("latest_checkpointed_iteration.txt"));
    dcp(["inspect", &uri]).ok();
    for text in ["", "not a number", "77", LFS] {
        fs::write(&tracker, text).unwrap();
        let file = "latest_checkpointed_iteration.txt";
        let verified = dcp(["verify", &uri]);
        assert!(verified.code == 1 && verified.stdout.contains(file), "{}", verified.stdout);
        dcp(["inspect", &uri]).not_whole(&[file]);
        let listed = dcp(["ls", &uri]);
        assert!(listed.code == 0 && listed.stderr.contains(file), "{}", listed.stderr);
        let listing = dcp(["ls", "--json", &uri]).json();
        assert!(listing["tracker_problem"].is_string(), "{listing}");
    }
    let step = run.path().join("iter_0000001");
    copy("../megatron/head020_basic_integrity/ckpt", &step);
    let uri = step.display().to_string();
    fs::write(step.join("integrity.json"), LFS).unwrap();
    dcp(["inspect", &uri]).not_whole(&["integrity.json", "is a pointer of Git LFS"]);
    fs::write(step.join("integrity.json"), "{\"algorithm\":").unwrap();
    // No reader needs it.
    assert_eq!(entry(&path(&run, ""), "iter_0000001")["complete"], Value::Null);
    dcp(["inspect", &uri]).not_whole(&["integrity.json"]);
    let verified = dcp(["verify", &uri]);
    assert!(verified.code == 1 && verified.stdout.contains("integrity.json"));
}

/// Two runs, the second of which has a step whose save did not finish.
fn runs() -> TempDir {
    let runs = tempfile::tempdir().unwrap();
    for name in ["a/step-1", "a/step-2", "b/step-1", "b/step-2"] {
        copy("t21_plain", &runs.path().join(name));
    }
    fs::remove_file(runs.path().join("b/step-2/.metadata")).unwrap();
    runs
}

#[test]
fn a_folder_of_runs_lists_the_checkpoints_of_all_runs() {
    let runs = runs();
    let listing = dcp(["ls", "--json", &path(&runs, "")]).json();
    let found: Vec<_> = listing["entries"].as_array().unwrap().iter().collect();
    let found: Vec<_> = found.iter().map(|one| json!([one["name"], one["complete"]])).collect();
    let expected =
        [("a/step-1", true), ("a/step-2", true), ("b/step-1", true), ("b/step-2", false)];
    assert_eq!(found, expected.map(|(name, complete)| json!([name, complete])));
    assert_eq!(listing["latest"], Value::Null);
    // As many as `inspect` counts.
    let fixtures = fixtures().parent().unwrap().display().to_string();
    let counted = dcp(["inspect", &fixtures]).stderr;
    let listing = dcp(["ls", "--json", &fixtures]).json();
    let entries = listing["entries"].as_array().unwrap();
    let listed = entries.iter().filter(|entry| entry["complete"] == true).count();
    let count = counted.split("there are ").nth(1).and_then(|rest| rest.split(' ').next());
    let count: usize = count.unwrap_or_else(|| panic!("{counted}")).parse().unwrap();
    assert!(listed >= count && count > 40, "{listed} of {count}");
}

#[test]
fn a_stray_file_beside_a_tracker_does_not_hide_the_run() {
    let run = tempfile::tempdir().unwrap();
    copy("../megatron/run_torch_dist_dp2", run.path());
    let uri = path(&run, "");
    let before = dcp(["ls", "--json", &uri]).json();
    model(&run.path().join("other"), &[]);
    fs::rename(run.path().join("other/model.safetensors"), run.path().join("stray.safetensors"))
        .unwrap();
    fs::remove_dir_all(run.path().join("other")).unwrap();
    let listing = dcp(["ls", "--json", &uri]).json();
    assert_eq!(listing["entries"], before["entries"]);
    assert_eq!(listing["latest"], before["latest"]);
}

#[test]
fn a_description_of_megatron_that_says_another_thing_is_no_whole_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (run, uri) = (folder.path().join("run"), path(&folder, "run"));
    for (json, complete) in [
        ("{}", json!(false)),
        (r#"{"sharded_backend": 5}"#, json!(false)),
        (r#"{"sharded_backend": "zarr", "sharded_backend_version": 1}"#, json!(false)),
        (r#"{"sharded_backend": "other", "sharded_backend_version": 1}"#, Value::Null),
        (r#"{"sharded_backend": "torch_dist", "sharded_backend_version": 99}"#, Value::Null),
        (r#"{"sharded_backend": "torch_dist", "common_backend_version": 2}"#, Value::Null),
        (r#"{"sharded_backend": "zarr", "common_backend": "zarrx"}"#, Value::Null),
        (&*format!(r#"{{"sharded_backend": "torch_dist"{}}}"#, " ".repeat(2 << 20)), json!(false)),
    ] {
        copy("../megatron/tp2_basic/ckpt", &run.join("step-10"));
        copy("../megatron/tp2_basic/ckpt", &run.join("step-20"));
        fs::write(run.join("step-20/metadata.json"), json).unwrap();
        assert_eq!(entry(&uri, "step-20")["complete"], complete, "{json}");
        assert_ne!(dcp(["inspect", &path(&folder, "run/step-20")]).code, 0, "{json}");
        dcp(["prune", &uri, "--keep-last", "1", "--yes"]);
        assert!(run.join("step-10/metadata.json").exists(), "{json}");
        fs::remove_dir_all(&run).unwrap();
    }
}

#[test]
fn a_linked_part_of_a_step_is_refused_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let (run, uri) = (folder.path().join("run"), path(&folder, "run"));
    for part in ["pytorch_model_fsdp_0", "optimizer_0"] {
        for step in ["step-10", "step-20"] {
            copy("fsdp2_adam_2r", &run.join(step).join("pytorch_model_fsdp_0"));
            copy("fsdp2_adam_2r", &run.join(step).join("optimizer_0"));
        }
        let (step, outside) = (path(&folder, "run/step-20"), folder.path().join("outside"));
        fs::rename(run.join("step-20").join(part), &outside).unwrap();
        symlink(&outside, run.join("step-20").join(part)).unwrap();
        assert_eq!(entry(&uri, "step-20")["complete"], Value::Null, "{part}");
        let (target, refused) = (path(&folder, "target"), [part, "symbolic link"]);
        dcp(["-q", "inspect", &step]).fails(2, &refused);
        for command in ["verify", "stats"] {
            dcp([command, &step]).fails(2, &refused);
        }
        dcp(["convert", &step, &target, "--to", "dcp"]).fails(2, &refused);
        assert!(!Path::new(&target).exists(), "{part}");
        dcp(["prune", &uri, "--keep-last", "1", "--yes"]);
        assert!(run.join("step-10").join(part).exists(), "{part}");
        fs::remove_dir_all(&run).unwrap();
        fs::remove_dir_all(&outside).unwrap();
    }
}

#[test]
fn a_linked_array_of_zarr_is_refused_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let (run, uri) = (folder.path().join("run"), path(&folder, "run"));
    let part = "both.weight3d";
    for step in ["step-10", "step-20"] {
        copy("../megatron/v09_zarr/ckpt", &run.join(step));
    }
    let (step, outside) = (path(&folder, "run/step-20"), folder.path().join("outside"));
    dcp(["verify", &path(&folder, "run/step-10")]).ok();
    fs::rename(run.join("step-20").join(part), &outside).unwrap();
    symlink(&outside, run.join("step-20").join(part)).unwrap();
    assert_eq!(entry(&uri, "step-20")["complete"], Value::Null);
    let (target, refused) = (path(&folder, "target"), [part, "symbolic link"]);
    for command in ["verify", "inspect", "stats"] {
        dcp([command, &step]).fails(2, &refused);
    }
    dcp(["convert", &step, &target, "--to", "dcp"]).fails(2, &refused);
    assert!(!Path::new(&target).exists());
    dcp(["prune", &uri, "--keep-last", "1", "--yes"]);
    assert!(run.join("step-10").exists());
}
