//! `inspect --json` against what PyTorch's own metadata says.

use std::fs;

use serde_json::{Value, json};

use crate::support::{all_fixtures, dcp, fixtures, read_json};

/// Their metadata names places that are no places (spec 3.9); the reader finds the true ones.
const WRONG_PLACES: [&str; 2] = ["safetensors_fmt_2r", "safetensors_fmt_with_objects"];

#[test]
fn every_fixture_is_shown_as_its_metadata_says() {
    let mut compared = 0;
    for fixture in all_fixtures() {
        let path = fixtures().join(&fixture).join("expected_metadata.json");
        if !path.exists() {
            continue;
        }
        let expected = read_json(&path);
        let found = dcp(["inspect", &fixture, "--json"]).json();
        compare(&fixture, &found, &expected);
        compared += 1;
    }
    assert!(compared > 30, "only {compared} fixtures were compared");
}

fn compare(fixture: &str, found: &Value, expected: &Value) {
    let fields: Vec<_> = found.as_object().unwrap().keys().collect();
    assert_eq!(fields, ["format", "keys", "files", "sidecar"], "{fixture}");
    assert_eq!(found["sidecar"], json!({"state": "absent"}), "{fixture}");
    assert_eq!(found["format"], "torch_dcp");
    let keys = found["keys"].as_object().unwrap();
    let entries = expected["state_dict_metadata"].as_array().unwrap();
    let names: Vec<_> = entries.iter().map(|entry| entry[0].as_str().unwrap()).collect();
    assert_eq!(keys.keys().collect::<Vec<_>>(), names, "{fixture}");
    for entry in entries {
        let (name, wanted) = (entry[0].as_str().unwrap(), &entry[1]);
        let key = &keys[name];
        if wanted["kind"] != "tensor" {
            assert_eq!(key["kind"], "object", "{fixture} {name}");
            assert!(key.get("value").is_some(), "{fixture} {name}");
            continue;
        }
        assert_eq!(key["kind"], "tensor", "{fixture} {name}");
        assert_eq!(key["dtype"], wanted["dtype"], "{fixture} {name}");
        assert_eq!(key["shape"], wanted["size"], "{fixture} {name}");
        let boxes = |chunk: &Value| json!([chunk["offsets"], chunk["sizes"]]);
        let chunks: Vec<_> = key["chunks"].as_array().unwrap().iter().map(boxes).collect();
        assert_eq!(&Value::from(chunks), &wanted["chunks"], "{fixture} {name}");
    }
    let files = found["files"].as_object().unwrap();
    for row in expected["storage_data"].as_array().unwrap() {
        let (index, place) = (&row[0], &row[1]);
        let file = place["relative_path"].as_str().unwrap();
        let len = fs::metadata(fixtures().join(fixture).join(file)).unwrap().len();
        assert_eq!(files[file], len, "{fixture} {file}");
        let name = index["fqn"].as_str().unwrap();
        if index["offset"].is_null() || WRONG_PLACES.contains(&fixture) {
            continue;
        }
        let chunks = keys[name]["chunks"].as_array().unwrap();
        let chunk = chunks.iter().find(|chunk| chunk["offsets"] == index["offset"]).unwrap();
        assert_eq!(chunk["file"], place["relative_path"], "{fixture} {name}");
        assert_eq!(chunk["byte_offset"], place["offset"], "{fixture} {name}");
        assert_eq!(chunk["byte_len"], place["length"], "{fixture} {name}");
    }
}

#[test]
fn one_tensor_has_exactly_these_fields() {
    let found = dcp(["inspect", "fsdp2_adam_2r", "--json"]).json();
    assert_eq!(
        found["keys"]["model.norm.bias"],
        json!({
            "kind": "tensor",
            "dtype": "float32",
            "shape": [8],
            "bytes": 32,
            "chunks": [
                {
                    "offsets": [0],
                    "sizes": [4],
                    "file": "__0_0.distcp",
                    "byte_offset": 9974,
                    "byte_len": 1577
                },
                {
                    "offsets": [4],
                    "sizes": [4],
                    "file": "__1_0.distcp",
                    "byte_offset": 31539,
                    "byte_len": 1577
                }
            ]
        })
    );
    assert_eq!(found["keys"]["step"], json!({ "kind": "object", "value": 17 }));
    assert_eq!(
        found["keys"]["optimizer.param_groups.0.betas"]["value"],
        json!({ "type": "tuple", "items": [0.9, 0.999] })
    );
}

#[test]
fn rank_local_metadata_is_merged() {
    let found = dcp(["inspect", "no_collectives_2r", "--json"]).json();
    assert_eq!(found["keys"]["w"]["chunks"].as_array().unwrap().len(), 2);
}

#[test]
fn filters_choose_names() {
    let found =
        dcp(["inspect", "fsdp2_adam_2r", "--json", "--filter", "model.layers.?.bias"]).json();
    let names: Vec<_> = found["keys"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["model.layers.0.bias", "model.layers.1.bias"]);
    dcp(["inspect", "fsdp2_adam_2r", "--filter", "modle.*"])
        .fails(2, &["no name matches \"modle.*\"", "hint:"]);
}

#[test]
fn a_safetensors_file_is_a_checkpoint_too() {
    let found = dcp(["inspect", "fsdp2_adam_2r/expected.safetensors", "--json"]).json();
    assert_eq!(found["format"], "safetensors");
    assert_eq!(found["keys"]["model.norm.bias"]["shape"], json!([8]));
    let len = fs::metadata(fixtures().join("fsdp2_adam_2r/expected.safetensors")).unwrap().len();
    assert_eq!(found["files"], json!({ "expected.safetensors": len }));
}
