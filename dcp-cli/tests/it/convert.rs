//! `convert`: to one safetensors file and back.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{all_fixtures, assert_same_tensors, dcp, expected, fixtures, path, tensors};

/// Whose objects are meant, where each rank has its own.
fn rank_of(fixture: &str) -> &'static [&'static str] {
    if fixture == "no_collectives_2r" { &["--rank=0"] } else { &[] }
}

#[test]
fn every_fixture_becomes_one_file() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in all_fixtures() {
        let file = path(&folder, &format!("{fixture}.safetensors"));
        let convert = ["convert", &fixture, &file, "--to", "safetensors", "--json"];
        let report = dcp(convert.iter().chain(rank_of(&fixture))).json();
        let mut found = tensors(file.as_ref());
        let wanted = expected(&fixture);
        // A dtype that only we can name in the file is in its metadata, and the shape with it.
        for name in report["raw"].as_array().unwrap() {
            let name = name.as_str().unwrap();
            assert_eq!(wanted["tensors"][name]["encoding"], "raw_u8", "{fixture} {name}");
            let described = dcp(["inspect", &file, "--json"]).json()["keys"][name].clone();
            assert_eq!(described["dtype"], wanted["tensors"][name]["dtype"], "{fixture} {name}");
            assert_eq!(described["shape"], wanted["tensors"][name]["shape"], "{fixture} {name}");
            found.get_mut(name).unwrap().0 = "uint8".to_owned();
        }
        if fixture == "no_collectives_2r" {
            // The file of what is expected holds what every rank has.
            found.retain(|name, _| !name.starts_with("rank_only_"));
        }
        assert_same_tensors(&found, &fixture);
        let all = dcp(["inspect", &fixture, "--json"]).json()["keys"].clone();
        let objects = all.as_object().unwrap().iter().filter(|(_, key)| key["kind"] == "object");
        let objects: Vec<Value> = objects.map(|(name, _)| json!(name)).collect();
        assert_eq!(report["left_out"], json!(objects), "{fixture}");
        assert_eq!(report["bytes"], fs::metadata(&file).unwrap().len(), "{fixture}");
    }
}

#[test]
fn what_is_left_out_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.safetensors");
    let run = dcp(["convert", "fsdp2_adam_2r", &file, "--to", "safetensors"]);
    assert_eq!(run.stdout, format!("{file}: 39 tensors, 7.9 KiB\n"));
    assert!(run.stderr.starts_with("note: left out 17 objects: optimizer.param_groups.0.lr, "));
    let header = fs::read(&file).unwrap();
    let header = String::from_utf8_lossy(&header);
    assert!(header.contains(r#""__metadata__":{"format":"pt","dcp.left_out":"[\"optimizer."#));

    let run = dcp(["-q", "convert", "fsdp2_adam_2r", &file, "--to", "safetensors", "--overwrite"]);
    assert_eq!((run.code, &*run.stdout, &*run.stderr), (0, "", ""));
}

#[test]
fn a_file_becomes_a_checkpoint_and_a_file_again() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in ["all_dtypes", "fsdp2_adam_2r", "empty_zero"] {
        let at = |name: &str| path(&folder, &format!("{fixture}{name}"));
        let (first, middle, last) = (at("_1.safetensors"), at("_dcp"), at("_2.safetensors"));
        dcp(["convert", fixture, &first, "--to", "safetensors"]).ok();
        dcp(["convert", &first, &middle, "--to", "dcp"]).ok();
        dcp(["verify", &middle, "--deep"]).ok();
        dcp(["convert", &middle, &last, "--to", "safetensors"]).ok();
        assert_eq!(tensors(first.as_ref()), tensors(last.as_ref()), "{fixture}");
    }
}

#[test]
fn a_target_is_replaced_only_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.safetensors");
    fs::write(&file, "precious").unwrap();
    let convert = ["convert", "zstd_2r", &file, "--to", "safetensors"];
    dcp(convert).fails(2, &[&format!("{file:?} exists already"), "hint: pass --overwrite"]);
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    dcp(convert.iter().chain(&["--overwrite"])).ok();
    assert_same_tensors(&tensors(file.as_ref()), "zstd_2r");

    // What cannot be read replaces nothing.
    fs::write(&file, "precious").unwrap();
    let broken = crate::support::copy_of("fsdp2_adam_2r");
    fs::remove_file(broken.path().join("__1_0.distcp")).unwrap();
    let source = broken.path().display().to_string();
    let run = dcp(["convert", &source, &file, "--to", "safetensors", "--overwrite"]);
    run.fails(1, &["__1_0.distcp"]);
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left behind");
}

#[test]
fn a_file_without_objects_needs_no_note() {
    let folder = tempfile::tempdir().unwrap();
    let file = path(&folder, "x.safetensors");
    let run = dcp(["convert", "strided_4r", &file, "--to", "safetensors"]);
    assert_eq!((run.code, &*run.stderr), (0, ""));
    assert!(fixtures().join("strided_4r").exists());
}

#[test]
fn a_model_becomes_a_hugging_face_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (target, config) = (path(&folder, "model"), path(&folder, "original"));
    fs::create_dir(&config).unwrap();
    fs::write(format!("{config}/config.json"), "{}").unwrap();
    fs::write(format!("{config}/tokenizer.json"), "[]").unwrap();
    fs::write(format!("{config}/modeling.py"), "import os").unwrap();
    let convert = [
        "convert",
        "fsdp2_adam_2r",
        &target,
        "--to=hf",
        "--max-shard-size=1KB",
        "--config",
        &config,
    ];
    let run = dcp(convert);
    assert_eq!(run.stderr, "note: taking the model, 12 of 56 keys; --everything takes all\n");
    // --everything does not take what is excluded.
    let state = ["epoch", "lr_scheduler.*", "optimizer.*", "step"].map(|key| ["--exclude", key]);
    let excluded = path(&folder, "excluded");
    let excluding = ["convert", "fsdp2_adam_2r", &excluded, "--to=hf"];
    let excluded = dcp(excluding.iter().chain(state.as_flattened()));
    assert!(!excluded.stderr.contains("taking the model"), "{}", excluded.stderr);
    let mut names: Vec<_> = fs::read_dir(&target)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "modeling.py",
            "tokenizer.json"
        ]
    );
    let index = fs::read(format!("{target}/model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], 1368);
    let mut wanted = crate::support::expected_tensors("fsdp2_adam_2r");
    wanted.retain(|name, _| name.starts_with("model."));
    for (name, tensor) in wanted {
        let short = name.strip_prefix("model.").unwrap();
        let file = index["weight_map"][short].as_str().unwrap();
        assert_eq!(tensors(format!("{target}/{file}").as_ref())[short], tensor, "{short}");
    }
    dcp(["-q"].iter().chain(&convert)).fails(2, &["exists already", "hint: pass --overwrite"]);
    dcp(convert.iter().chain(&["--overwrite"])).ok();
}

#[test]
fn tied_tensors_are_written_once_and_views_each() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixtures().join("../torch_save/tied/model.pt").display().to_string();
    for dtype in [&[][..], &["--dtype=f64"]] {
        let file = path(&folder, "x.safetensors");
        let convert = ["convert", &source, &file, "--overwrite", "--json"];
        let report = dcp(convert.iter().chain(dtype)).json();
        assert_eq!(report["tied"], json!({"lm_head.weight": "embed.weight"}));
        let found = tensors(file.as_ref());
        assert_eq!(found.len(), 4, "the views have the same storage and shape, but other elements");
        assert_ne!(found["a"].2, found["b"].2);
        assert_ne!(found["a"].2, found["t"].2);
        // Both are there again when the file is read.
        let again = path(&folder, "again.pt");
        let report = dcp(["convert", &file, &again, "--overwrite", "--json"]).json();
        assert_eq!(report["tied"], json!({"lm_head.weight": "embed.weight"}));
        dcp(["diff", &source, &again, "--ignore-dtype"]).ok();
    }
}

#[test]
fn every_fixture_becomes_a_file_of_torch_save_with_its_objects() {
    let folder = tempfile::tempdir().unwrap();
    for fixture in all_fixtures() {
        let (file, again) = (path(&folder, "x.pt"), path(&folder, "again"));
        let convert = ["convert", &fixture, &file, "--overwrite", "--json"];
        let report = dcp(convert.iter().chain(rank_of(&fixture))).json();
        assert_eq!(report["bytes"], fs::metadata(&file).unwrap().len(), "{fixture}");
        dcp(["verify", &file, "--deep"]).ok();
        dcp(["convert", &file, &again, "--to=dcp", "--overwrite"]).ok();
        // A quantized tensor is an object in a file of torch.save.
        if fixture == "quantized" {
            continue;
        }
        let keys = |uri: &str| {
            let mut keys = dcp(["inspect", uri, "--json"]).json()["keys"].clone();
            for key in keys.as_object_mut().unwrap().values_mut() {
                key.as_object_mut().unwrap().remove("chunks");
            }
            keys
        };
        let (before, after) = (keys(&fixture), keys(&again));
        for (name, key) in before.as_object().unwrap() {
            // An object that is a dict, or a list of some, is none any more when it is flattened.
            let plain = !key["value"].is_object() && !key["value"].is_array();
            if after.get(name).is_some() || plain {
                assert_eq!(&after[name], key, "{fixture} {name}");
            }
        }
        let (from, to) = (path(&folder, "a.safetensors"), path(&folder, "b.safetensors"));
        let convert = ["convert", &fixture, &from, "--overwrite"];
        dcp(convert.iter().chain(rank_of(&fixture))).ok();
        dcp(["convert", &again, &to, "--overwrite"]).ok();
        let (from, mut to) = (tensors(from.as_ref()), tensors(to.as_ref()));
        // Tensors that were inside of an object are tensors of their own now.
        to.retain(|name, _| from.contains_key(name) || before.get(name).is_some());
        assert_eq!(from, to, "{fixture}");
    }
}

/// A quantized tensor is its archive: the elements alone mean nothing.
#[test]
fn quantized_tensors_keep_their_scales() {
    let folder = tempfile::tempdir().unwrap();
    let copy = path(&folder, "copy");
    dcp(["reshard", "quantized", &copy, "--ranks=1"]).ok();
    let data = |place: &str| fs::read(fixtures().join(place).join("__0_0.distcp"));
    assert_eq!(data("quantized").unwrap(), data(&copy).unwrap());
    let keys = |place: &str| dcp(["inspect", place, "--json"]).json()["keys"].clone();
    assert_eq!(keys("quantized")["qint8"]["dtype"], keys(&copy)["qint8"]["dtype"]);
    dcp(["diff", "quantized", &copy]).ok();
    dcp(["verify", "--deep", &copy]).ok();
    // Renamed and next to tensors that are cast, too.
    let file = path(&folder, "x.pt");
    let rename = "--rename=s/^q/z/";
    dcp(["convert", "quantized", &file, "--dtype=bf16", rename]).ok();
    let value = &dcp(["inspect", &file, "--json"]).json()["keys"]["zint8"]["value"];
    assert!(value.to_string().contains("torch.per_tensor_affine"), "{value}");
}

#[test]
fn what_a_format_cannot_hold_is_no_fault_of_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let target = path(&folder, "x");
    let run = dcp(["-q", "convert", "quantized", &target, "--to=torch-dist"]);
    assert!(!run.stderr.contains("dcp verify"), "{}", run.stderr);
    run.fails(2, &["\"qint8\" cannot be written: ", "needs a scale", "--exclude leaves it out"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn an_empty_model_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let source = ["../torch_save/kinds/zip.pt", "--include=args"];
    for to in ["--to=safetensors", "--to=hf"] {
        let target = path(&folder, "x");
        dcp(["-q", "convert", source[0], &target, source[1], to])
            .fails(2, &["the checkpoint has no tensors, only objects"]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_model_that_fails_leaves_no_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let (target, config) = (path(&folder, "model"), path(&folder, "original"));
    fs::create_dir(&config).unwrap();
    fs::write(format!("{config}/config.json"), "{}").unwrap();
    let broken = crate::support::copy_of("fsdp2_adam_2r");
    let file = broken.path().join("__1_0.distcp");
    let mut bytes = fs::read(&file).unwrap();
    // In the elements of a tensor of the model: what is read is found to be damaged.
    let elements = bytes.windows(4).rposition(|four| four == b"PK\x07\x08").unwrap() - 700;
    bytes[..elements].fill(0x5a);
    fs::write(&file, &bytes).unwrap();
    let source = broken.path().display().to_string();
    let run = dcp(["-q", "convert", &source, &target, "--to=hf", "--config", &config]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    assert!(!Path::new(&target).exists());
}
