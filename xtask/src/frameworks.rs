//! What a build with some features of the facade, or of the formats, does not contain.

use std::collections::BTreeSet;

use crate::formats;
use xtask_host::workspace;

/// Features of the facade, and crates that they must not bring.
const WITHOUT: [(&str, &[&str]); 7] = [
    ("fs", &["dcp-jobs", "dcp-megatron", "dcp-olmo", "dcp-mapping", "dcp-peft"]),
    // A trainer with the manager of a run.
    (
        "fs,jobs,collectives,blocking",
        &[
            "dcp-megatron",
            "dcp-olmo",
            "dcp-mapping",
            "dcp-peft",
            "dcp-storage-object",
            "toml",
            "saphyr-parser",
        ],
    ),
    (
        "fs,megatron",
        &["dcp-olmo", "dcp-mapping", "dcp-peft", "dcp-storage-object", "toml", "saphyr-parser"],
    ),
    (
        "fs,olmo",
        &["dcp-megatron", "dcp-mapping", "dcp-peft", "dcp-storage-object", "toml", "saphyr-parser"],
    ),
    ("fs,mapping", &["dcp-megatron", "dcp-olmo", "dcp-peft", "dcp-storage-object"]),
    ("fs,peft", &["dcp-megatron", "dcp-olmo", "dcp-mapping", "dcp-storage-object"]),
    (
        "memory",
        &["dcp-storage-fs", "dcp-jobs", "dcp-megatron", "dcp-olmo", "dcp-mapping", "dcp-peft"],
    ),
];

/// Features of the formats, and crates that they must not bring.
const FORMATS_WITHOUT: [(&str, &[&str]); 6] = [
    ("safetensors", &["ciborium", "flate2", "zstd", "safetensors"]),
    ("hf", &["ciborium", "flate2", "zstd", "safetensors"]),
    ("zarr", &["ciborium", "flate2", "zstd", "safetensors"]),
    ("torch-save", &["ciborium", "serde_json", "zstd", "safetensors"]),
    ("torch-dcp", &["zstd", "safetensors"]),
    ("safetensors-crate", &["ciborium", "flate2", "zstd"]),
];

/// The crates that a package is built from with these features.
fn built_from(package: &str, features: &str) -> BTreeSet<String> {
    let mut cargo = workspace::cargo();
    cargo.args(["tree", "--package", package, "--no-default-features", "--features", features]);
    cargo.args(["--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    let output = cargo.current_dir(workspace::root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).unwrap();
    names.lines().filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect()
}

#[test]
fn a_feature_brings_no_framework_but_its_own() {
    for (features, never) in WITHOUT {
        let built = built_from("distcp", features);
        assert!(built.contains("dcp-core"), "{features}: {built:?}");
        for name in never {
            assert!(!built.contains(*name), "{features} brings {name}");
        }
    }
}

#[test]
fn the_default_features_bring_every_framework() {
    let built = built_from("distcp", "default");
    for name in ["dcp-jobs", "dcp-megatron", "dcp-olmo", "dcp-mapping", "dcp-peft"] {
        assert!(built.contains(name), "{name}");
    }
}

#[test]
fn a_format_brings_no_crate_of_another() {
    for (features, never) in FORMATS_WITHOUT {
        let built = built_from(formats::PACKAGE, features);
        assert!(built.contains("dcp-core"), "{features}: {built:?}");
        for name in never {
            assert!(!built.contains(*name), "{features} brings {name}");
        }
    }
}
