//! `unshard`: a model as plain files.

use std::fs;
use std::path::Path;

use crate::support::{dcp, path};

const NESTED: &str = "../olmo/fsdp2-2rank-nested/ckpt";

#[test]
fn every_strategy_and_format_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    for (format, one, index) in [
        ("safetensors", "model.safetensors", "model/model.safetensors.index.json"),
        ("pt", "model.pt", "model/pytorch_model.bin.index.json"),
    ] {
        let base = path(&folder, format);
        dcp(["unshard", NESTED, &base, "--format", format, "--optim"]).ok();
        let file = format!("{base}/{one}");
        dcp(["verify", &file, "--deep"]).ok();
        let keys = dcp(["inspect", &file, "--json"]).json()["keys"].as_object().unwrap().len();
        assert_eq!(keys, 14);
        let mut chunked = vec!["unshard", NESTED, &base, "--format", format];
        chunked.extend(["--strategy", "chunks", "--chunk-size", "1000", "--json"]);
        let report = dcp(chunked).json();
        assert!(report["files"].as_object().unwrap().len() > 3, "{report}");
        assert!(Path::new(&base).join(index).exists());
        let split = path(&folder, &format!("{format}-split"));
        dcp(["unshard", NESTED, &split, "--format", format, "--strategy", "per-tensor"]).ok();
        let name = format!("{split}/model/model-blocks-0-w1-weight.{format}");
        dcp(["get", &name, "blocks.0.w1.weight"]).ok();
    }
    // Chunks and their index are a folder like any other of sharded safetensors.
    let chunks = path(&folder, "safetensors/model");
    let keys = dcp(["inspect", &chunks, "--json"]).json()["keys"].as_object().unwrap().len();
    assert_eq!(keys, 14);
}

#[test]
fn what_is_written_and_what_is_not_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "out");
    let dry = dcp(["unshard", NESTED, &target, "--dry-run"]);
    assert!(dry.stderr.contains("not written, as no part of it"), "{}", dry.stderr);
    assert!(dry.ok().contains("would get 14 tensors in 1 file"));
    assert!(!Path::new(&target).exists());
    dcp(["unshard", NESTED, &target]).ok();
    dcp(["unshard", NESTED, &target]).fails(2, &["exists already", "--overwrite"]);
    dcp(["unshard", NESTED, &target, "--overwrite"]).ok();
    dcp(["unshard", NESTED, NESTED]).fails(2, &["same"]);
}

#[test]
fn wrong_wishes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "out");
    let unshard = |source: &str, more: &[&str]| dcp([&["unshard", source, &target], more].concat());
    assert_eq!(unshard(NESTED, &["--strategy", "chunks"]).code, 2);
    unshard(NESTED, &["--chunk-size", "1GB"]).fails(2, &["--strategy chunks"]);
    let zero = ["--strategy", "chunks", "--chunk-size", "0"];
    unshard(NESTED, &zero).fails(2, &["--chunk-size is 0"]);
    let any = "../olmo/any-4rank/ckpt";
    unshard(any, &["--strategy", "per-tensor"]).fails(2, &["with-dash.x", "with.dash-x"]);
    let bare = "../olmo/fsdp2-2rank-bf16-modelonly/ckpt";
    unshard(bare, &["--optim"]).fails(2, &["saved without its optimizer"]);
    unshard("views", &[]).fails(2, &["\"model\" is not in this checkpoint"]);
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none(), "nothing was made");
}

/// Names of keys alone do not distinguish layouts: paths do, by which the files are nested.
#[test]
fn optimizers_are_resharded_and_converted_in_either_layout() {
    let folder = tempfile::tempdir().unwrap();
    let flat = "../olmo/fsdp2-2rank-flat/ckpt";
    for (source, layout, same) in [(NESTED, "flat", flat), (flat, "nested", NESTED)] {
        let target = path(&folder, layout);
        dcp(["reshard", source, &target, "--ranks", "3", "--optimizer-layout", layout]).ok();
        dcp(["verify", &target, "--deep"]).ok();
        dcp(["diff", &target, same]).ok();
        let file = path(&folder, &format!("{layout}.pt"));
        dcp(["convert", source, &file, "--everything", "--optimizer-layout", layout]).ok();
        dcp(["diff", &file, &target]).ok();
    }
}
