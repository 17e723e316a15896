//! What a build with one format alone compiles of `dcp-formats`, by the list of sources that the compiler
//! writes.

use std::path::{Path, PathBuf};

use serde_json::Value;

use xtask_host::workspace::{list, text};
use xtask_host::{Result, process, workspace};

pub(crate) const PACKAGE: &str = "dcp-formats";

/// A feature, a module that it brings, and those that it must not bring.
const ALONE: [(&str, &str, &[&str]); 4] = [
    ("safetensors", "safetensors", &["dcp", "hf", "metadata", "zarr"]),
    ("hf", "hf", &["dcp", "metadata", "zarr"]),
    ("zarr", "zarr", &["dcp", "hf", "metadata", "safetensors"]),
    ("torch-save", "torch_save", &["dcp", "hf", "metadata", "safetensors", "zarr"]),
];
/// Modules that read pickles and archives of PyTorch, which only the formats of PyTorch bring.
const OF_TORCH: [&str; 5] = ["pickle", "torch_object", "torch_save", "torch_tensor", "torch_zip"];

/// Compiles the library with each feature alone.
pub(crate) fn check() -> Result {
    for (feature, brought, never) in ALONE {
        println!("  with {feature} alone");
        let sources = compiled(feature)?;
        let has = |module: &str| {
            let path = format!("{PACKAGE}/src/{module}");
            let (file, folder) = (format!("{path}.rs"), format!("{path}/"));
            sources.iter().any(|source| source.ends_with(&file) || source.contains(&folder))
        };
        if !has(brought) {
            return Err(format!("{feature} alone does not compile {brought}").into());
        }
        let of_torch = if feature.starts_with("torch") { &[][..] } else { &OF_TORCH };
        if let Some(module) = never.iter().chain(of_torch).find(|module| has(module)) {
            return Err(format!("{feature} alone compiles the module {module} of {PACKAGE}").into());
        }
    }
    Ok(())
}

/// The sources of the library with one feature.
fn compiled(feature: &str) -> Result<Vec<String>> {
    let mut check = workspace::cargo();
    check.args(["check", "--quiet", "--package", PACKAGE, "--lib", "--message-format=json"]);
    check.args(["--no-default-features", "--features", feature]);
    let messages = process::output(&mut check)?;
    let library = messages.lines().find_map(of_library);
    let library = library.ok_or_else(|| format!("cargo names no library of {PACKAGE}"))?;
    let name = library.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
    let name = name.strip_prefix("lib").unwrap_or(name);
    let list = library.with_file_name(format!("{name}.d"));
    let list = std::fs::read_to_string(&list)
        .map_err(|error| format!("cannot read {}: {error}", list.display()))?;
    Ok(sources(&list))
}

/// The file of the library, if a message of cargo is about it.
fn of_library(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    let is_library = text(&message, "reason") == "compiler-artifact"
        && text(message.get("target")?, "name") == PACKAGE.replace('-', "_");
    let file = list(&message, "filenames").iter().filter_map(Value::as_str);
    is_library
        .then(|| file.map(Path::new).find(|file| file.extension() == Some("rmeta".as_ref())))?
        .map(Path::to_owned)
}

/// The sources in a list of dependencies in the language of make.
fn sources(list: &str) -> Vec<String> {
    let names = list.lines().filter(|line| line.ends_with(".rs:"));
    names.map(|line| line.trim_end_matches(':').replace('\\', "/")).collect()
}

#[test]
fn sources_are_read_from_the_list_of_the_compiler() {
    let list = "a.d: dcp-formats/src/lib.rs dcp-formats/src/hf/mod.rs\n\n\
                dcp-formats/src/lib.rs:\ndcp-formats/src/hf/mod.rs:\n\n# env-dep:CLIPPY_ARGS\n";
    assert_eq!(sources(list), ["dcp-formats/src/lib.rs", "dcp-formats/src/hf/mod.rs"]);
}
