//! Public names: no two types of one name, and few at the root of a crate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::tidy::{lines_before_tests, rust_sources};
use crate::workspace;

/// Names that several public types have. A change may rename one, and shortens this list by it;
/// none is added.
const SHARED: &[&str] = &["Entry", "LoadOptions", "OpenOptions", "SaveOptions"];

/// At most so many names besides modules at the root of a crate: more are not read at a glance.
const AT_THE_ROOT: usize = 25;

/// Crates with more, and how many at most. A change may move some into modules, and lowers the
/// number; none is added.
const MORE: &[(&str, usize)] = &[("dcp-checkpoint", 38)];

/// The public types of each published crate: name to the files that define it.
fn types() -> BTreeMap<String, Vec<PathBuf>> {
    let public: Vec<PathBuf> = sources_of_public_crates();
    let mut types: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for (file, source) in rust_sources() {
        if file.ends_with("tests.rs") || !public.iter().any(|sources| file.starts_with(sources)) {
            continue;
        }
        for name in lines_before_tests(&source).filter_map(defined_type) {
            types.entry(name.to_owned()).or_default().push(file.clone());
        }
    }
    types
}

fn sources_of_public_crates() -> Vec<PathBuf> {
    let packages = workspace::packages().unwrap().into_iter();
    packages.filter(|package| package.is_public()).map(|package| package.dir.join("src")).collect()
}

/// The type that a line defines for everybody. What is `pub` can be reached from outside: the
/// compiler warns of the rest (`unreachable_pub`).
fn defined_type(line: &str) -> Option<&str> {
    let item = line.strip_prefix("pub ")?;
    let kinds = ["struct ", "enum ", "trait ", "union ", "type "];
    let name = kinds.iter().find_map(|kind| item.strip_prefix(kind))?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// The names, modules aside, that the root of a crate makes public.
fn root_names(source: &str) -> BTreeSet<String> {
    let code: Vec<&str> = lines_before_tests(source)
        .map(|line| line.split("//").next().unwrap_or(line).trim())
        .collect();
    let code = code.join(" ");
    let mut names = BTreeSet::new();
    for item in code.split(';').filter_map(|item| item.rsplit_once("pub use ")) {
        names.extend(leaves(item.1));
    }
    for line in source.lines() {
        let function = line.strip_prefix("pub ").map(|item| item.trim_start_matches("async "));
        let function = function.and_then(|item| item.strip_prefix("fn "));
        let constant = line.strip_prefix("pub const ").or(line.strip_prefix("pub static "));
        let name = function.or(constant).map(|item| {
            item.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
        });
        names.extend(name.or(defined_type(line)).map(str::to_owned));
    }
    names
}

/// The last names of the paths that a `use` names. A crate under another name is a module.
fn leaves(tree: &str) -> BTreeSet<String> {
    let is_crate = !tree.contains("::");
    let words = tree.split(['{', '}', ',']).map(str::trim);
    words
        .filter(|path| !is_crate && !path.is_empty() && !path.ends_with("::"))
        .map(|path| path.rsplit([' ', ':']).next().unwrap_or(path).to_owned())
        .collect()
}

#[test]
fn no_two_public_types_have_one_name() {
    let types = types();
    assert!(types.len() > 300, "{} public types", types.len());
    let shared: BTreeMap<&str, &Vec<PathBuf>> = types
        .iter()
        .filter(|(_, files)| files.len() > 1)
        .map(|(name, files)| (name.as_str(), files))
        .collect();
    let new: Vec<_> = shared.iter().filter(|(name, _)| !SHARED.contains(name)).collect();
    let gone: Vec<_> = SHARED.iter().filter(|name| !shared.contains_key(**name)).collect();
    assert!(new.is_empty() && gone.is_empty(), "new: {new:#?}\nin SHARED and no more: {gone:#?}");
}

#[test]
fn the_root_of_a_crate_is_read_at_a_glance() {
    let mut wrong = Vec::new();
    for sources in sources_of_public_crates() {
        let root =
            std::fs::read_to_string(workspace::root().join(&sources).join("lib.rs")).unwrap();
        let (crate_, count) = (sources.parent().unwrap().display(), root_names(&root).len());
        let known = MORE.iter().find(|(listed, _)| crate_.to_string() == *listed);
        match known {
            Some(_) if count <= AT_THE_ROOT => {
                wrong.push(format!("{crate_} has {count}: remove it from MORE"));
            }
            Some((_, most)) if count > *most => wrong.push(format!("{crate_}: {count} of {most}")),
            None if count > AT_THE_ROOT => {
                wrong.push(format!("{crate_} has {count}: move some into modules"));
            }
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "names at the root:\n{}", wrong.join("\n"));
}

#[test]
fn names_at_a_root_are_understood() {
    let source = "//! Crate.\nmod a;\npub mod b;\npub use a::{A, c::{D, E as F}, // and\n    g,\n};\n\
        pub use dcp_core as core;\npub use a::X;\npub(crate) use a::Y;\n\
        pub async fn open() {}\npub struct S;\npub const C: u8 = 1;\n";
    assert_eq!(
        root_names(source),
        ["A", "C", "D", "F", "S", "X", "g", "open"].map(String::from).into()
    );
}
