//! Unfinished saves: reported by every command, replaced by a run that
//! finishes, and ignored by other saves; targets that are no regular files.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use crate::megatron::megatron;
use crate::support::{dcp, path};

const SOURCE: &str = "t21_plain";
const MEGATRON: &str = "tp2_basic/ckpt";

#[test]
fn only_regular_files_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let (pipe, socket) = (path(&folder, "pipe.safetensors"), path(&folder, "socket.safetensors"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let listener = UnixListener::bind(&socket).unwrap();
    for target in [&pipe, &socket] {
        for more in [&["--overwrite"][..], &["--overwrite", "--dry-run"], &[]] {
            for to in ["safetensors", "torch-save"] {
                let args = ["convert", SOURCE, target, "--to", to];
                dcp(args.iter().chain(more)).fails(2, &["never replaced"]);
            }
        }
        let args = ["get", SOURCE, "model.embed.weight", "-o", target, "--overwrite"];
        dcp(args).fails(2, &["never replaced"]);
    }
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    assert!(fs::metadata(&socket).unwrap().file_type().is_socket());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    drop(listener);
}

/// A model that lacks its index, or a file too, is shown by `inspect` and taken by no other command.
#[test]
fn a_model_that_was_not_written_to_its_end_is_taken_by_no_command() {
    let folder = tempfile::tempdir().unwrap();
    let model = path(&folder, "model");
    let to = ["--to", "hf", "--max-shard-size", "600"];
    dcp(["convert", SOURCE, &model].iter().chain(&to)).ok();
    let file = |name: &str| Path::new(&model).join(name);
    let shards: Vec<String> = fs::read_dir(&model)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".safetensors"))
        .collect();
    assert!(shards.len() > 1, "{shards:?}");
    fs::remove_file(file("model.safetensors.index.json")).unwrap();
    let unfinished = |said: &str| {
        let verified = dcp(["verify", &model, "--deep"]);
        assert_eq!(verified.code, 1, "{}", verified.stdout);
        assert!(verified.stdout.contains(said), "{}", verified.stdout);
        let shown = dcp(["inspect", &model]);
        assert!(shown.stderr.contains("not written to its end"), "{}", shown.stderr);
        shown.not_whole(&[]);
        assert_eq!(dcp(["ls", &model, "--json"]).json()["entries"][0]["complete"], false);
        let out = |name: &str| path(&folder, name);
        for args in [
            vec!["convert", &*model, &out("out"), "--to", "dcp"],
            vec!["convert", &*model, &out("out.safetensors")],
            vec!["convert", &*model, &out("out"), "--to", "torch-dist"],
            vec!["reshard", &*model, &out("out"), "--ranks", "2"],
            vec!["average", &*model, "--out", &out("out"), "--to", "dcp"],
            vec!["merge", &*model, "--out", &out("out"), "--to", "dcp"],
        ] {
            dcp(&args).fails(1, &[said]);
        }
        assert!(!Path::new(&out("out")).exists() && !Path::new(&out("out.safetensors")).exists());
    };
    unfinished("model.safetensors.index.json");
    fs::remove_file(file(&shards[0])).unwrap();
    unfinished(&shards[0]);
    // It is in the way of other formats, and the run that finishes it replaces it.
    dcp(["convert", SOURCE, &model, "--to", "dcp", "--overwrite"])
        .fails(2, &["Hugging Face model"]);
    dcp(["convert", SOURCE, &model, "--overwrite"].iter().chain(&to)).ok();
    dcp(["verify", &model, "--deep"]).ok();
    assert_eq!(fs::read_dir(&model).unwrap().count(), shards.len() + 1);
}

/// Of this program, which left a sidecar, and of Megatron-Core itself.
#[test]
fn an_unfinished_save_of_megatron_is_finished_and_in_the_way_of_other_formats() {
    let folder = tempfile::tempdir().unwrap();
    let ours = path(&folder, "ours");
    dcp(["convert", &megatron(MEGATRON), &ours, "--to", "torch-dist"]).ok();
    let newest = path(&folder, "newest");
    let form = ["--to", "torch-dist", "--form", "newest"];
    dcp(["convert", &megatron(MEGATRON), &newest].iter().chain(&form)).ok();
    let theirs = path(&folder, "theirs");
    dcp_testing::copy_folder(megatron(MEGATRON).as_ref(), theirs.as_ref());
    for target in [&ours, &newest, &theirs] {
        fs::remove_file(Path::new(target).join("metadata.json")).unwrap();
        for without in [None, Some(".metadata")] {
            if let Some(name) = without {
                if target == &newest {
                    // It looks like an unfinished save of PyTorch then.
                    continue;
                }
                fs::remove_file(Path::new(target).join(name)).unwrap();
            }
            for to in ["dcp", "hf"] {
                let args = ["-q", "convert", SOURCE, target, "--to", to, "--overwrite"];
                dcp(args).fails(2, &["files of an unfinished save (Megatron)"]);
            }
        }
        let args = ["convert", &megatron(MEGATRON), target, "--to", "torch-dist", "--overwrite"];
        dcp(args).ok();
        dcp(["verify", target, "--deep"]).ok();
        dcp(["diff", target, &megatron(MEGATRON)]).ok();
    }
}

#[test]
fn an_unfinished_save_of_pytorch_is_finished_by_either_format_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    for (to, source) in [("dcp", SOURCE.to_owned()), ("torch-dist", megatron(MEGATRON))] {
        let target = path(&folder, to);
        dcp(["convert", SOURCE, &target, "--to", "dcp", "--ranks", "3"]).ok();
        fs::remove_file(Path::new(&target).join(".metadata")).unwrap();
        dcp(["verify", &target]).fails(1, &["did not finish"]);
        dcp(["-q", "convert", SOURCE, &target, "--to", "hf"]).fails(2, &["did not finish"]);
        dcp(["convert", &source, &target, "--to", to, "--overwrite"]).ok();
        dcp(["verify", &target, "--deep"]).ok();
        dcp(["diff", &target, &source]).ok();
    }
}

#[test]
fn an_unfinished_step_of_olmo_core_is_in_the_way() {
    let folder = tempfile::tempdir().unwrap();
    let step = path(&folder, "step10");
    let inner = format!("{step}/model_and_optim");
    dcp(["convert", SOURCE, &inner, "--to", "dcp"]).ok();
    fs::remove_file(Path::new(&inner).join(".metadata")).unwrap();
    for to in ["dcp", "hf", "torch-dist"] {
        let args = ["-q", "convert", SOURCE, &step, "--to", to, "--overwrite"];
        dcp(args)
            .fails(2, &["files of an unfinished save (OLMo step)", "model_and_optim/.metadata"]);
    }
}
