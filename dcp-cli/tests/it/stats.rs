//! `stats`: what is printed of the numbers, and that the NaN is found.

use std::fs;

use dcp::DType;
use dcp::formats::safetensors::{SafetensorsItem, encode_header};

use crate::look::snapshot;
use crate::support::{dcp, path};

/// A model with a NaN, an infinity, subnormal numbers and a tensor of zeros.
fn sick(folder: &tempfile::TempDir) -> String {
    let tensor = |name: &str, dtype, shape: &[u64]| SafetensorsItem {
        name: name.into(),
        dtype,
        shape: shape.into(),
    };
    let items = [
        tensor("layers.0.weight", DType::Float32, &[8, 16]),
        tensor("layers.0.bias", DType::Float16, &[4]),
        tensor("layers.1.weight", DType::Float32, &[3, 2]),
        tensor("layers.1.zeros", DType::BFloat16, &[5]),
        tensor("nothing", DType::Float32, &[0, 3]),
        tensor("step", DType::Int64, &[]),
    ];
    let encoded = encode_header(&items, &Default::default()).unwrap();
    let mut file = encoded.bytes.to_vec();
    let floats = |values: &mut dyn Iterator<Item = f32>| -> Vec<u8> {
        values.flat_map(f32::to_le_bytes).collect()
    };
    for index in encoded.order {
        file.extend(match index {
            0 => floats(&mut (0..128_i16).map(|n| (f32::from(n) - 40.0).powi(3) / 9000.0)),
            // 65504, the largest; the smallest there is; -1; 0.5.
            1 => [0x7bff_u16, 1, 0xbc00, 0x3800].into_iter().flat_map(u16::to_le_bytes).collect(),
            2 => floats(&mut [1.0, 2.0, 3.0, f32::NAN, f32::INFINITY, 4.0].into_iter()),
            3 => vec![0; 10],
            4 => vec![],
            _ => 1000_i64.to_le_bytes().to_vec(),
        });
    }
    let path = path(folder, "sick.safetensors");
    fs::write(&path, file).unwrap();
    path
}

#[test]
fn tables_fit_the_terminal() {
    for columns in ["60", "80", "120"] {
        let name = format!("stats_fsdp2_{columns}.txt");
        snapshot(&name, &["stats", "fsdp2_adam_2r", "--filter", "model"], columns);
    }
    snapshot("stats_objects.txt", &["stats", "objects", "--nan"], "80");
    snapshot("stats_one.txt", &["stats", "fsdp2_adam_2r", "model.embed.weight"], "80");
    snapshot("help_stats.txt", &["stats", "--help"], "100");
}

#[test]
fn the_nan_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let file = sick(&folder);
    let text = dcp(["stats", &file]).ok();
    assert!(text.contains("✗ 1 NaN and 1 Inf; the first at [1, 1]"), "{text}");
    assert!(text.contains("sick.safetensors · shard [0:3, 0:2]"), "{text}");
    assert!(text.contains("✗ 1 NaN and 1 Inf in 1 tensor\n"), "{text}");
    assert!(!text.contains('\x1b'), "no color where there is no terminal");
    let bad = dcp(["stats", &file, "--nan"]).ok();
    assert!(bad.contains("layers.1.weight") && !bad.contains("layers.0"), "{bad}");

    let report = dcp(["stats", &file, "--json"]).json();
    let tensor = &report["tensors"]["layers.1.weight"];
    assert_eq!((&tensor["nan"], &tensor["pos_inf"]), (&1.into(), &1.into()));
    assert_eq!(tensor["first_non_finite"], serde_json::json!([1, 1]));
    assert_eq!((&tensor["min"], &tensor["max"]), (&1.0.into(), &4.0.into()));
    assert_eq!(tensor["histogram"][0]["exponent"], 0);
    assert_eq!(report["tensors"]["step"]["max"], 1000);
    assert!(report["tensors"]["nothing"]["mean"].is_null());
    let bias = &report["tensors"]["layers.0.bias"];
    assert_eq!((&bias["subnormal"], &bias["near_overflow"]), (&1.into(), &1.into()));
    assert_eq!(report["total"]["count"], 128 + 4 + 6 + 5 + 1);
}

#[test]
fn scripts_get_an_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let file = sick(&folder);
    for (what, filter, code) in [
        ("nan,inf", "layers.1.weight", 1),
        ("inf", "layers.1.weight", 1),
        ("nan,inf", "layers.0", 0),
        ("overflow", "layers.0.bias", 1),
        ("overflow", "layers.0.weight", 0),
        ("zeros", "layers.1.zeros", 1),
        ("zeros", "nothing", 0),
    ] {
        let run = dcp(["stats", &file, "--fail-on", what, "--filter", filter, "--quiet"]);
        assert_eq!((run.code, &*run.stdout, &*run.stderr), (code, "", ""), "{what} {filter}");
    }
    let run = dcp(["stats", "objects", "--fail-on", "nan", "-q"]);
    assert_eq!(run.code, 1);
    dcp(["stats", &file, "--filter", "nobody"]).fails(2, &["no name matches \"nobody\""]);
    dcp(["stats", &file, "layers.0.weigt"]).fails(2, &["did you mean", "layers.0.weight"]);
}

#[test]
fn tensors_are_sorted() {
    let folder = tempfile::tempdir().unwrap();
    let file = sick(&folder);
    let first = |by: &str| {
        let report = dcp(["stats", &file, "--sort", by, "--json"]).json();
        report["tensors"].as_object().unwrap().keys().next().unwrap().clone()
    };
    assert_eq!(first("name"), "layers.0.bias");
    assert_eq!(first("bad"), "layers.1.weight");
    assert_eq!(first("max"), "layers.0.bias");
    assert_eq!(first("size"), "layers.0.weight");
    assert_eq!(first("zero"), "layers.1.zeros");
}

#[test]
fn one_tensor_has_a_large_histogram() {
    let folder = tempfile::tempdir().unwrap();
    let file = sick(&folder);
    let text = dcp(["stats", &file, "layers.0.bias"]).ok();
    assert!(text.contains("headroom   none: twice the largest is infinite"), "{text}");
    assert!(text.lines().any(|line| line.contains("2^15") && line.ends_with("overflow")), "{text}");
    let smallest = text.lines().last().unwrap();
    assert!(smallest.ends_with("subnormal"), "{text}");
    let text = dcp(["stats", &file, "layers.1.weight"]).ok();
    assert!(text.contains("the first at [1, 1]"), "{text}");
    assert!(dcp(["stats", &file, "nothing"]).ok().contains("numbers    0\n"));
}
