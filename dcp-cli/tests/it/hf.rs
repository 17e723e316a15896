//! Folders of Hugging Face models: every command takes them.

use std::fs;

use serde_json::{Value, json};

use crate::support::{dcp, fixtures, path, tensors};

fn folder_of(fixture: &str) -> String {
    fixtures().join("../hf").join(fixture).join("ckpt").display().to_string()
}

fn expected(fixture: &str) -> std::path::PathBuf {
    fixtures().join("../hf").join(fixture).join("expected.safetensors")
}

/// A copy that may be damaged.
fn copy_of(fixture: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder_of(fixture)).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    folder
}

#[test]
fn folders_are_inspected_and_verified() {
    for (fixture, files) in [("rank0_index", 3), ("sharded_2r", 2), ("consolidated_2r", 1)] {
        let found = dcp(["inspect", &folder_of(fixture), "--json"]).json();
        assert_eq!(found["format"], "hf", "{fixture}");
        assert_eq!(found["files"].as_object().unwrap().len(), files, "{fixture}");
        assert_eq!(found["keys"]["emb"]["shape"], json!([7, 4]), "{fixture}");
        let report = dcp(["verify", &folder_of(fixture), "--deep", "--json"]).json();
        assert_eq!((&report["ok"], &report["notes"]), (&json!(true), &json!([])), "{fixture}");
    }
    let sharded = format!("{}/sharded", folder_of("consolidated_2r"));
    let found = dcp(["inspect", &sharded, "--json"]).json();
    assert_eq!(found["keys"]["emb"]["chunks"].as_array().unwrap().len(), 2);
    let index = format!("{}/model.safetensors.index.json", folder_of("rank0_index"));
    assert_eq!(dcp(["inspect", &index, "--json"]).json()["files"].as_object().unwrap().len(), 3);
}

#[test]
fn folders_are_converted_and_resharded() {
    let out = tempfile::tempdir().unwrap();
    for fixture in ["rank0_index", "sharded_2r"] {
        let (file, ranks) = (path(&out, &format!("{fixture}.safetensors")), path(&out, fixture));
        dcp(["convert", &folder_of(fixture), &file, "--to", "safetensors"]).ok();
        assert_eq!(tensors(file.as_ref()), tensors(&expected(fixture)), "{fixture}");
        dcp(["reshard", &folder_of(fixture), &ranks, "--ranks", "3"]).ok();
        let again = path(&out, &format!("{fixture}_again.safetensors"));
        dcp(["convert", &ranks, &again, "--to", "safetensors"]).ok();
        assert_eq!(tensors(again.as_ref()), tensors(&expected(fixture)), "{fixture}");
        let text = dcp(["get", &folder_of(fixture), "l0.b"]).ok();
        assert_eq!(text, dcp(["get", &file, "l0.b"]).ok());
    }
}

#[test]
fn all_that_is_wrong_is_listed() {
    let folder = copy_of("rank0_index");
    let place = folder.path().display().to_string();
    fs::remove_file(folder.path().join("model-00002-of-00003.safetensors")).unwrap();
    let file = folder.path().join("model-00003-of-00003.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    fs::write(folder.path().join("stray.safetensors"), &bytes).unwrap();
    let run = dcp(["verify", &place, "--json"]);
    assert_eq!(run.code, 1);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    let mut found: Vec<_> = report["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| (problem["kind"].as_str().unwrap(), problem["file"].as_str().unwrap()))
        .collect();
    found.sort_unstable();
    let expected = [
        ("missing_file", "model-00002-of-00003.safetensors"),
        ("short_file", "model-00003-of-00003.safetensors"),
    ];
    assert_eq!(found, expected);
    assert!(report["notes"][0].as_str().unwrap().contains("stray.safetensors"), "{report}");
    // What is whole can still be looked at, but nothing is made from it.
    dcp(["get", &place, "l0.b"]).ok();
    let out = path(&folder, "out.st");
    let run = dcp(["convert", &place, &out, "--to", "safetensors"]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(run.stderr.contains("model-00002-of-00003.safetensors"), "{}", run.stderr);
}

#[test]
fn what_is_missing_is_not_taken_for_nothing() {
    let folder = copy_of("rank0_index");
    let (place, whole) = (folder.path().display().to_string(), folder_of("rank0_index"));
    let lost = "model-00002-of-00003.safetensors";
    fs::remove_file(folder.path().join(lost)).unwrap();
    dcp(["stats", &place]).fails(1, &[lost]);
    dcp(["stats", &place, "--json"]).fails(1, &[lost]);
    dcp(["report", &place, "--stats", "--json"]).fails(1, &[lost]);
    dcp(["report", &place, "--json"]).ok();
    for options in [&[][..], &["--keys-only"]] {
        for (a, b) in [(&place, &whole), (&whole, &place)] {
            dcp([&["diff", a, b], options].concat()).fails(3, &[lost]);
        }
    }
    let found = dcp(["inspect", &place, "--json"]).not_whole(&[lost]);
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(found["files"][lost], json!(null), "{found}");
    assert_eq!(found["files"].as_object().unwrap().len(), 3);
    let text = dcp(["inspect", &place]).not_whole(&[lost]);
    let line = text.lines().find(|line| line.starts_with(lost)).unwrap();
    assert!(line.contains("missing"), "{line}");
}

#[test]
fn a_pointer_of_git_lfs_is_no_file() {
    let folder = copy_of("rank0");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    fs::write(folder.path().join("model-00001-of-00001.safetensors"), pointer).unwrap();
    let run = dcp(["convert", &folder.path().display().to_string(), "x.safetensors"]);
    assert!(run.stderr.contains("git lfs pull"), "{}", run.stderr);
}

#[test]
fn a_folder_that_is_two_things_says_so() {
    let folder = copy_of("rank0");
    for entry in fs::read_dir(fixtures().join("nested")).unwrap() {
        let entry = entry.unwrap();
        if !entry.file_name().to_string_lossy().starts_with("expected") {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    let place = folder.path().display().to_string();
    let report = dcp(["verify", &place, "--json"]).json();
    assert_eq!(report["format"], "torch_dcp");
    let note = report["notes"][0].as_str().unwrap();
    assert!(note.contains("model.safetensors.index.json is here, too"), "{note}");
    // Without its index the DCP checkpoint is no more than remains.
    fs::remove_file(folder.path().join(".metadata")).unwrap();
    let report = dcp(["verify", &place, "--json"]).json();
    assert_eq!(report["format"], "hf");
    assert!(report["notes"][0].as_str().unwrap().contains(".distcp is here, too"), "{report}");
    // Without the index of the model, both are equally likely.
    fs::remove_file(folder.path().join("model.safetensors.index.json")).unwrap();
    dcp(["verify", &place]).fails(1, &["no .metadata", "it also holds 1 safetensors file,"]);
}

#[test]
fn quantized_weights_become_plain_numbers() {
    let out = tempfile::tempdir().unwrap();
    let file = path(&out, "plain.safetensors");
    let source = folder_of("quant_fp8_block");
    let convert = ["convert", &source, &file, "--dequantize", "f32"];
    dcp(convert).fails(2, &["--block-size", "give the size of the blocks"]);
    dcp(convert.iter().chain(&["--block-size", "2x2"])).fails(2, &["--block-size", "2 × 2"]);
    dcp(convert.iter().chain(&["--block-size", "0x0"])).fails(2, &["128x128"]);
    dcp(convert.iter().chain(&["--block-size", "4x4"])).ok();
    assert_eq!(tensors(file.as_ref()), tensors(&expected("quant_fp8_block")));
    dcp(convert.iter().chain(&["--block-size", "4"])).fails(2, &["128x128"]);
    // A configuration that says how weights are quantized no longer does.
    let config = tempfile::tempdir().unwrap();
    let text =
        r#"{"a": 1, "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}"#;
    fs::write(config.path().join("config.json"), text).unwrap();
    let (model, from) = (path(&out, "model"), config.path().display().to_string());
    let to_hf = ["convert", &source, &model, "--to=hf", "--config", &from];
    dcp(to_hf.iter().chain(&["--dequantize=bf16", "--block-size=4x4"])).ok();
    let written = fs::read_to_string(format!("{model}/config.json")).unwrap();
    assert_eq!(written, "{\n  \"a\": 1\n}\n");
    dcp(to_hf.iter().chain(&["--overwrite"])).ok();
    assert_eq!(fs::read_to_string(format!("{model}/config.json")).unwrap(), text);
    // The files of the source model are copied unless --config names others.
    fs::write(format!("{model}/tokenizer.json"), "{}").unwrap();
    fs::write(format!("{model}/modeling.py"), "import os").unwrap();
    let plain = path(&out, "plain");
    let run = dcp(["convert", &model, &plain, "--to=hf", "--dequantize=bf16"]);
    assert!(
        run.stderr.contains("copying config.json, tokenizer.json, modeling.py from"),
        "{}",
        run.stderr
    );
    run.ok();
    assert_eq!(fs::read_to_string(format!("{plain}/config.json")).unwrap(), written);
    assert_eq!(fs::read_to_string(format!("{plain}/tokenizer.json")).unwrap(), "{}");
    assert!(std::path::Path::new(&plain).join("modeling.py").exists());
    // Now the folder says itself how large its blocks are.
    dcp(["convert", &model, &file, "--dequantize=f32", "--overwrite"]).ok();
    assert_eq!(tensors(file.as_ref()), tensors(&expected("quant_fp8_block")));

    let mxfp4 = path(&out, "mxfp4.safetensors");
    dcp(["convert", &folder_of("quant_mxfp4"), &mxfp4, "--dequantize=bf16"]).ok();
    let found = tensors(mxfp4.as_ref());
    // With the input axis first, as transformers has it.
    assert_eq!((&*found["m.w"].0, &found["m.w"].1), ("bfloat16", &vec![2, 16, 3]));
}

/// As transformers has it: the main file, and others only by name.
#[test]
fn every_command_reads_the_main_file_of_a_model_unless_told() {
    let folder = tempfile::tempdir().unwrap();
    let model = path(&folder, "model");
    fs::create_dir(&model).unwrap();
    let source = "../torch_save/states/root.pt";
    for (file, dtype) in [("model", "fp32"), ("model.fp16", "fp16"), ("model.bf16", "bf16")] {
        let file = format!("{model}/{file}.safetensors");
        dcp(["convert", source, &file, "--model-only", "--dtype", dtype]).ok();
    }
    let (main, half) =
        (format!("{model}/model.safetensors"), format!("{model}/model.fp16.safetensors"));
    for (variant, file, dtype) in
        [(&[][..], &main, "float32"), (&["--variant=fp16"], &half, "float16")]
    {
        let with = |args: &[&str]| dcp(args.iter().chain(variant));
        let shown = with(&["inspect", &model, "--json"]).json();
        assert_eq!(shown["keys"]["0.weight"]["dtype"], dtype);
        let value = |run: crate::support::Run| run.json();
        assert_eq!(
            value(with(&["get", &model, "0.weight", "--json"])),
            value(dcp(["get", file, "0.weight", "--json"]))
        );
        with(&["verify", &model, "--deep"]).ok();
        assert!(with(&["stats", &model]).ok().contains(dtype));
        with(&["diff", &model, file]).ok();
        let copy = path(&folder, &format!("{dtype}.safetensors"));
        let run = with(&["convert", &model, &copy]);
        assert_eq!(run.stderr.contains("not reading"), variant.is_empty(), "{}", run.stderr);
        run.ok();
        assert_eq!(fs::read(&copy).unwrap(), fs::read(file).unwrap());
    }
    dcp(["inspect", &model, "--variant=fp8"])
        .fails(2, &["no variant \"fp8\"", "leave --variant out"]);
    // A variant alone is the model.
    fs::remove_file(&main).unwrap();
    fs::remove_file(format!("{model}/model.bf16.safetensors")).unwrap();
    let shown = dcp(["inspect", &model, "--json"]).json();
    assert_eq!(shown["keys"]["0.weight"]["dtype"], "float16");
}

/// Of `pytorch_model.bin`, in one file and in several, by transformers' names.
#[test]
fn variants_of_models_of_torch_save_are_read_when_named() {
    let folder = tempfile::tempdir().unwrap();
    let source = "../torch_save/states/root.pt";
    let write = |file: &str, dtype: &str, more: &[&str]| {
        let target = path(&folder, file);
        let args = ["convert", source, &target, "--to=torch-save", "--model-only"];
        dcp(args.iter().chain(&[&*format!("--dtype={dtype}")]).chain(more).copied()).ok();
    };
    write("pytorch_model.bin", "fp32", &[]);
    write("pytorch_model.fp16.bin", "fp16", &[]);
    let shards = ["pytorch_model.bf16-00001-of-00002.bin", "pytorch_model.bf16-00002-of-00002.bin"];
    write(shards[0], "bf16", &["--exclude=2"]);
    write(shards[1], "bf16", &["--include=2"]);
    let map = json!({"0.weight": shards[0], "0.bias": shards[0], "2.weight": shards[1], "2.bias": shards[1]});
    let index = json!({"weight_map": map}).to_string();
    fs::write(path(&folder, "pytorch_model.bin.index.bf16.json"), index).unwrap();
    let place = folder.path().display().to_string();
    for (variant, dtype) in
        [(&[][..], "float32"), (&["--variant=fp16"], "float16"), (&["--variant=bf16"], "bfloat16")]
    {
        let with = |args: &[&str]| dcp(args.iter().chain(variant).copied());
        let keys = with(&["inspect", &place, "--json"]).json()["keys"].clone();
        let keys = keys.as_object().unwrap();
        assert_eq!(keys.len(), 4, "{variant:?}");
        assert!(keys.values().all(|key| key["dtype"] == dtype), "{keys:?}");
        with(&["verify", &place, "--deep"]).ok();
        let (copy, whole) = (path(&folder, "copy.safetensors"), path(&folder, "x.safetensors"));
        with(&["convert", &place, &copy, "--overwrite"]).ok();
        dcp(["convert", source, &whole, "--model-only", "--dtype", dtype, "--overwrite"]).ok();
        dcp(["diff", &copy, &whole]).ok();
        // They lie where the main model is looked for.
        fs::remove_file(&copy).unwrap();
        fs::remove_file(&whole).unwrap();
    }
    dcp(["inspect", &place, "--variant=fp8"]).fails(2, &["fp8"]);
    // An index of a variant names files that are there.
    fs::remove_file(path(&folder, shards[1])).unwrap();
    dcp(["inspect", &place, "--variant=bf16"]).fails(1, &[shards[1]]);
}
