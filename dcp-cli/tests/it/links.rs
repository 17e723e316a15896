//! Symbolic links in and around checkpoints.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::megatron::megatron;
use crate::support::{dcp, fixtures, path};

#[test]
fn a_snapshot_in_the_cache_of_the_hugging_face_hub_is_a_model() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--tiny");
    let snapshot = repository.join("snapshots/abc");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(repository.join("blobs")).unwrap();
    for entry in fs::read_dir(fixtures().join("../hf/rank0_index/ckpt")).unwrap() {
        let entry = entry.unwrap();
        let blob = format!("{:x}", entry.file_name().len() * 77);
        let blob = format!("{blob}-{}", entry.file_name().display());
        fs::copy(entry.path(), repository.join("blobs").join(&blob)).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(entry.file_name())).unwrap();
    }
    let uri = snapshot.display().to_string();
    let found = dcp(["inspect", &uri, "--json"]).json();
    assert_eq!(found["format"], "hf", "{found}");
    dcp(["verify", "--deep", &uri]).ok();
    dcp(["convert", &uri, &path(&cache, "out.safetensors")]).ok();
    let file = found["files"].as_object().unwrap().keys().next().unwrap();
    dcp(["inspect", &format!("{uri}/{file}")]).ok();
    // What is outside the repository is not reached.
    let secret = cache.path().join("secret.safetensors");
    fs::copy(path(&cache, "out.safetensors"), &secret).unwrap();
    fs::remove_file(snapshot.join(file)).unwrap();
    symlink(&secret, snapshot.join(file)).unwrap();
    assert_ne!(dcp(["verify", &uri]).code, 0);
}

#[test]
fn a_configuration_that_conversions_cannot_read_is_a_problem_for_verify() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    dcp_testing::copy_folder(&fixtures().join("../hf/rank0_index/ckpt"), &model);
    let (uri, outside) = (model.display().to_string(), folder.path().join("config.json"));
    fs::write(&outside, "{\"model_type\": \"llama\"}").unwrap();
    fs::copy(&outside, model.join("config.json")).unwrap();
    dcp(["verify", &uri]).ok();
    fs::remove_file(model.join("config.json")).unwrap();
    symlink(&outside, model.join("config.json")).unwrap();
    assert_ne!(dcp(["-q", "convert", &uri, &path(&folder, "out.safetensors")]).code, 0);
    let verified = dcp(["verify", &uri]);
    assert_eq!(verified.code, 1, "{}", verified.stdout);
    assert!(verified.stdout.contains("config.json"), "{}", verified.stdout);
}

/// A folder of `--config` is read like any other.
#[test]
fn a_link_out_of_a_configuration_is_followed_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| path(&folder, name);
    fs::create_dir(at("config")).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        fs::write(folder.path().join(name), "{}").unwrap();
        let link = folder.path().join("config").join(name);
        symlink(format!("../{name}"), &link).unwrap();
        let (config, out) = (at("config"), at("out"));
        let convert = ["-q", "convert", "t21_plain", &out, "--to=hf", "--config", &config];
        dcp(convert).fails(2, &[name, "symbolic link", "--follow-links"]);
        assert!(!folder.path().join("out").exists());
        dcp(convert.iter().chain(&["--follow-links"])).ok();
        assert!(folder.path().join("out").join(name).is_file());
        fs::remove_dir_all(&out).unwrap();
        fs::remove_file(&link).unwrap();
        fs::copy(folder.path().join(name), &link).unwrap();
    }
    dcp(["convert", "t21_plain", &at("out"), "--to=hf", "--config", &at("config")]).ok();
}

#[test]
fn links_that_lead_out_are_followed_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk/iter_0000010");
    dcp_testing::copy_folder(Path::new(&megatron("run_torch_dist_dp2/iter_0000010")), &disk);
    let run = folder.path().join("run");
    fs::create_dir(&run).unwrap();
    fs::write(run.join("latest_checkpointed_iteration.txt"), "10").unwrap();
    symlink("../disk/iter_0000010", run.join("iter_0000010")).unwrap();
    let uri = path(&folder, "run");
    dcp(["inspect", &uri]).fails(2, &["iter_0000010", "symbolic link", "--follow-links"]);
    let found = dcp(["inspect", &uri, "--follow-links", "--json"]).json();
    assert_eq!(found["format"], "megatron_torch_dist", "{found}");
    let listed = dcp(["ls", &uri, "--follow-links", "--json"]).json();
    assert_eq!(listed["entries"].as_array().unwrap().len(), 1, "{listed}");
    dcp(["verify", "--deep", &uri, "--follow-links"]).ok();
    let linked = folder.path().join("linked");
    fs::create_dir(&linked).unwrap();
    for entry in fs::read_dir(&disk).unwrap() {
        let entry = entry.unwrap();
        symlink(entry.path(), linked.join(entry.file_name())).unwrap();
    }
    let uri = path(&folder, "linked");
    dcp(["verify", &uri]).fails(2, &["symbolic link", "--follow-links"]);
    dcp(["verify", "--deep", &uri, "--follow-links"]).ok();
}

#[test]
fn a_link_that_only_has_the_name_of_a_format_keeps_no_command_from_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("run/step10");
    fs::create_dir(folder.path().join("run")).unwrap();
    let uri = model.display().to_string();
    dcp(["convert", "-q", "t21_plain", &uri, "--to", "hf"]).ok();
    fs::write(folder.path().join("notes.json"), "{}").unwrap();
    symlink(folder.path().join("notes.json"), model.join("metadata.json")).unwrap();
    let listing = dcp(["ls", "--json", &path(&folder, "run")]).json();
    assert_eq!(listing["entries"][0]["complete"], true, "{listing:#}");
    dcp(["inspect", &uri]).ok();
    dcp(["verify", "--deep", &uri]).ok();
    dcp(["convert", &uri, &path(&folder, "out"), "--to", "dcp"]).ok();
    // Beside files of Megatron-Core it may be what describes them.
    let step = folder.path().join("run/step20");
    dcp_testing::copy_folder(megatron("tp2_basic/ckpt").as_ref(), &step);
    fs::remove_file(step.join("metadata.json")).unwrap();
    symlink(folder.path().join("notes.json"), step.join("metadata.json")).unwrap();
    let failed = dcp(["inspect", &step.display().to_string()]);
    let is_named =
        ["metadata.json", "symbolic link"].iter().all(|said| failed.stderr.contains(said));
    assert!(failed.code != 0 && is_named, "{}", failed.stderr);
}
