//! What a build with some features of the facade, or of the formats, does not contain.

use std::collections::BTreeSet;

use crate::formats;
use xtask_host::workspace;

/// The features of the facade that are frameworks, and the crate of each.
const FRAMEWORKS: [(&str, &str); 4] = [
    ("mapping", "dcp-mapping"),
    ("megatron", "dcp-megatron"),
    ("olmo", "dcp-olmo"),
    ("peft", "dcp-peft"),
];

/// Features of the facade beside its frameworks, and crates that they must not bring.
const WITHOUT: [(&str, &[&str]); 3] = [
    ("fs", &["dcp-jobs", "dcp-storage-object"]),
    // A trainer with the manager of a run.
    ("fs,jobs,collectives,blocking", &["dcp-storage-object", "toml", "saphyr-parser"]),
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

/// Fails where a build with these features has a crate of another framework, or one of `never`.
fn brings_only(features: &str, framework: Option<&str>, never: &[&str]) {
    let built = built_from("distcp", features);
    assert!(built.contains("dcp-core"), "{features}: {built:?}");
    let others = FRAMEWORKS.into_iter().filter(|(feature, _)| Some(*feature) != framework);
    for name in others.map(|(_, name)| name).chain(never.iter().copied()) {
        assert!(!built.contains(name), "{features} brings {name}");
    }
}

#[test]
fn a_feature_brings_no_framework_but_its_own() {
    for (features, never) in WITHOUT {
        brings_only(features, None, never);
    }
    for (feature, _) in FRAMEWORKS {
        // A mapping is a file of TOML or YAML.
        let never: &[&str] = match feature {
            "mapping" => &["dcp-storage-object"],
            _ => &["dcp-storage-object", "toml", "saphyr-parser"],
        };
        brings_only(&format!("fs,{feature}"), Some(feature), never);
    }
}

#[test]
fn the_default_features_bring_every_framework() {
    let built = built_from("distcp", "default");
    for name in FRAMEWORKS.map(|(_, name)| name).into_iter().chain(["dcp-jobs"]) {
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
