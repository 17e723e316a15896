//! What the contracts of plug-ins keep to, and where unsafe code is allowed.

use std::path::Path;

use crate::tidy::{lines_before_tests, rust_sources};

/// Files of the traits that plug-ins implement.
const CONTRACTS: &[&str] = &[
    "dcp-collectives-nccl/src/link.rs",
    "dcp-core/src/protocol/checkpoint.rs",
    "dcp-core/src/protocol/collective.rs",
    "dcp-core/src/tensors/device.rs",
    "dcp-core/src/format/audit.rs",
    "dcp-core/src/format/mod.rs",
    "dcp-core/src/format/target.rs",
    "dcp-core/src/plans/plan.rs",
    "dcp-core/src/storages/storage.rs",
    "dcp-cuda/src/device.rs",
    "dcp-megatron/src/open/strategy.rs",
];

/// Traits in these files that nobody implements: they add methods to all implementations.
const EXTENSIONS: &[&str] = &["StorageExt"];

/// The modules with unsafe code, each a leaf with its proof: memory that is lent, the calls of NVIDIA's driver and
/// of NCCL, and a loop that is compiled for instructions that not every processor has.
const UNSAFE: &[&str] = &[
    "dcp-collectives-nccl/src/nccl.rs",
    "dcp-core/src/tensors/memory.rs",
    "dcp-cuda/src/driver.rs",
    "dcp-peft/src/product.rs",
    "dcp-python/src/memory.rs",
];

/// The one module of `dcp-jobs` that writes to a storage: each of its steps consumes the proof
/// that what was read is undamaged.
const PUBLISHES: &str = "dcp-jobs/src/write/target.rs";

/// What is needed to write to a storage. Decorators of storages pass it on.
const WRITING: &[&str] = &["PutMode", "write_folder", "prepare_"];

/// Every trait of a source with its block.
fn traits(source: &str) -> Vec<(&str, &str)> {
    let starts =
        source.match_indices("\npub trait ").map(|(at, start)| &source[at + start.len()..]);
    let block = |source: &'_ str| source.find("\n}\n").map_or(source.len(), |end| end);
    let name = |source: &str| source.find(|c: char| !c.is_alphanumeric()).unwrap_or(source.len());
    starts.map(|source| (&source[..name(source)], &source[..block(source)])).collect()
}

/// Whether a method of a trait has a body.
fn has_default_method(block: &str) -> bool {
    let signatures = block.split("\n    ").filter(|line| !line.starts_with("//"));
    let code: String = signatures.skip(1).flat_map(|line| [line, "\n"]).collect();
    code.contains(" {\n") || code.contains("{}")
}

/// A decorator that forgets to forward a method must not compile: a default would turn, for example,
/// a durable storage into one that is not.
#[test]
fn plug_in_traits_have_no_default_methods() {
    let mut found = 0;
    let mut defaults = Vec::new();
    for (file, source) in rust_sources() {
        if !CONTRACTS.iter().any(|path| file == Path::new(path)) {
            continue;
        }
        for (name, block) in traits(&source) {
            found += 1;
            if has_default_method(block) && !EXTENSIONS.contains(&name) {
                defaults.push(format!("{name} in {}", file.display()));
            }
        }
    }
    assert!(found >= CONTRACTS.len(), "traits have moved: {found} found");
    assert!(defaults.is_empty(), "default methods:\n{}", defaults.join("\n"));
}

#[test]
fn unsafe_code_is_in_leaf_modules() {
    let allowed: Vec<_> = rust_sources()
        .into_iter()
        .filter(|(_, source)| source.contains(concat!("allow(unsafe", "_code")))
        .map(|(file, _)| file.display().to_string())
        .collect();
    assert_eq!(allowed, UNSAFE);
}

#[test]
fn one_module_of_jobs_publishes_besides_copies() {
    let writes: Vec<_> = rust_sources()
        .into_iter()
        .filter(|(file, _)| file.starts_with("dcp-jobs/src") && !file.ends_with("tests.rs"))
        .filter(|(_, source)| !source.contains("impl Storage for "))
        .filter(|(_, source)| {
            lines_before_tests(source).any(|line| WRITING.iter().any(|word| line.contains(word)))
        })
        .map(|(file, _)| file.display().to_string())
        .collect();
    // A copy compares what it wrote with what it read, and has no source to check. The others write no data of
    // a checkpoint: a token for ranks to compare, and pins and metrics of a run.
    let others = ["copy/copy_files.rs", "place/same_place.rs", "run/sidecar.rs"]
        .map(|file| format!("dcp-jobs/src/{file}"));
    assert_eq!(writes, [others.as_slice(), &[PUBLISHES.to_owned()]].concat());
}

#[test]
fn default_methods_are_found() {
    let source = "\npub trait A: B {\n    /// As `{}`.\n    fn a(&self) -> u8;\n}\n\
                  \npub trait C {\n    fn c(&self) -> u8 {\n        1\n    }\n}\n";
    let found: Vec<_> =
        traits(source).iter().map(|(name, block)| (*name, has_default_method(block))).collect();
    assert_eq!(found, [("A", false), ("C", true)]);
}

/// A key of an error names what failed. `CheckpointMetadata::entry_name` has a name for any entry.
#[test]
fn no_error_has_an_empty_key() {
    let empty = [
        "fqn: String::new()",
        "bad_plan(\"\"",
        "map_or(\"\", |(fqn, _)|",
        "map_or_else(String::new, |(fqn, _)|",
    ];
    let mut found = Vec::new();
    for (file, source) in rust_sources() {
        // A selection of keys maps names to names.
        if file.ends_with("contracts.rs") || file.ends_with("keys/select.rs") {
            continue;
        }
        for (number, line) in lines_before_tests(&source).enumerate() {
            if empty.iter().any(|text| line.contains(text)) {
                found.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "errors with an empty key:\n{}", found.join("\n"));
}
