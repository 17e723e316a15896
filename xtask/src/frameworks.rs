//! What a build with some features of the facade, or of the formats, does not contain.

use std::collections::BTreeSet;

use crate::formats;
use xtask_host::workspace;

/// The frameworks: the feature of the facade, the crate that it brings, and what else it must not bring.
const FRAMEWORKS: [(&str, &str, &[&str]); 6] = [
    ("megatron", "dcp-megatron", SETTINGS),
    ("olmo", "dcp-olmo", SETTINGS),
    ("mapping", "dcp-mapping", &["dcp-storage-object"]),
    ("peft", "dcp-peft", SETTINGS),
    ("deepspeed", "dcp-deepspeed", SETTINGS),
    ("trainers", "dcp-trainers", SETTINGS),
];

/// What reads the settings of jobs, and another storage.
const SETTINGS: &[&str] = &["dcp-storage-object", "toml", "saphyr-parser"];

/// Features of the facade without a framework, and what else they must not bring.
const WITHOUT: [(&str, &[&str]); 3] = [
    ("fs", &["dcp-jobs", "dcp-storage-object"]),
    // A trainer with the manager of a run.
    ("fs,jobs,collectives,blocking", SETTINGS),
    ("memory", &["dcp-storage-fs", "dcp-jobs"]),
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
    let none = WITHOUT.iter().map(|(features, never)| (features.to_string(), "", *never));
    let one =
        FRAMEWORKS.iter().map(|(feature, own, never)| (format!("fs,{feature}"), *own, *never));
    for (features, own, never) in none.chain(one) {
        let built = built_from("distcp", &features);
        assert!(built.contains("dcp-core"), "{features}: {built:?}");
        let others = FRAMEWORKS.iter().map(|(_, name, _)| name).filter(|name| **name != own);
        for name in never.iter().chain(others) {
            assert!(!built.contains(*name), "{features} brings {name}");
        }
    }
}

#[test]
fn the_default_features_bring_every_framework() {
    let built = built_from("distcp", "default");
    for name in FRAMEWORKS.iter().map(|(_, name, _)| *name).chain(["dcp-jobs"]) {
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
