//! Adapters of PEFT, merged by the command.

use crate::support::{dcp, path};

#[test]
fn an_adapter_is_merged_into_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let merged = path(&folder, "merged");
    let merge = ["merge", "../peft/wide_dora/base", "../peft/wide_dora/ckpt", "--adapter"];
    let merge = [&merge[..], &["--out", &merged, "--to", "hf"]].concat();
    let run = dcp(&merge);
    assert!(run.stderr.contains("changes 2 tensors"), "{}", run.stderr);
    run.ok();
    dcp(["diff", &merged, "../peft/wide_dora/expected.safetensors"]).ok();
    // The target is there, and stays as it is.
    let again = dcp(&merge);
    assert!(again.code == 2 && again.stderr.contains("exists already"), "{}", again.stderr);
    let over = [&merge[..], &["--overwrite", "--json"]].concat();
    assert_eq!(dcp(&over).json()["tensors"], 11);
}

#[test]
fn bases_and_adapters_are_not_confused() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "merged");
    let refused = |sources: &[&str], said: &str| {
        let args = [&["merge", "--adapter", "--to", "hf", "--out", &target], sources].concat();
        dcp(args).fails(2, &[said]);
        assert!(!std::path::Path::new(&target).exists());
    };
    let (base, adapter) = ("../peft/lora/base", "../peft/lora/ckpt");
    refused(&[base], "one adapter into one base, not 1");
    refused(&[base, adapter, adapter], "one adapter into one base, not 3");
    refused(&[adapter, base], "is an adapter itself");
    refused(&[base, base], "not an adapter of PEFT");
    let convert = ["convert", adapter, &target, "--to", "hf"];
    dcp(convert).fails(2, &["changes a base model", "dcp merge BASE ADAPTER --adapter"]);
}
