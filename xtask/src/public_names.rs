//! Public names: no two types of one name, and few at the root of a crate.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::tidy::{lines_before_tests, rust_sources};
use xtask_host::workspace;

/// At most so many names besides modules at the root of a crate: more are not read at a glance.
const AT_THE_ROOT: usize = 25;

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

/// The public type that a line defines. What is `pub` can be reached from outside: the
/// compiler warns of the rest (`unreachable_pub`).
fn defined_type(line: &str) -> Option<&str> {
    let item = line.strip_prefix("pub ")?;
    let kinds = ["struct ", "enum ", "trait ", "union ", "type "];
    let name = kinds.iter().find_map(|kind| item.strip_prefix(kind))?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// The names, modules aside, that the root of a crate makes public.
fn root_names(source: &str) -> BTreeSet<String> {
    let mut inside_module = false;
    let code: Vec<&str> = lines_before_tests(source)
        .filter(|line| {
            inside_module |= line.starts_with("pub mod ") && line.ends_with('{');
            let outside = !inside_module;
            inside_module &= *line != "}";
            outside
        })
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

/// The modules of private folders of `sources` that its root makes public, as `pub use folder::module`.
fn root_modules(sources: &Path, root: &str) -> BTreeSet<String> {
    let uses = root.split(';').filter_map(|item| item.trim().strip_prefix("pub use "));
    let mut modules = BTreeSet::new();
    for (folder, names) in uses.filter_map(|item| item.split_once("::")) {
        let folder = std::fs::read_to_string(sources.join(folder).join("mod.rs"));
        let folder = folder.unwrap_or_default();
        let is_module = |name: &String| folder.contains(&format!("\npub mod {name};"));
        modules.extend(leaves(&format!("::{names}")).into_iter().filter(is_module));
    }
    modules
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
    let shared: Vec<_> = types.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(shared.is_empty(), "public types of one name: {shared:#?}");
}

/// The text of `api/` has what macros and nested modules make too. A type that one crate exports
/// from another one is a `pub use` there.
#[test]
fn no_two_crates_export_types_of_one_name() {
    let mut crates: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in std::fs::read_dir(workspace::root().join("api")).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        for type_ in exported_types(&std::fs::read_to_string(&file).unwrap()) {
            crates.entry(type_.to_owned()).or_default().insert(name.clone());
        }
    }
    assert!(crates.len() > 300, "{} exported types", crates.len());
    crates.retain(|_, exported| exported.len() > 1);
    assert!(crates.is_empty(), "types of one name in several crates: {crates:#?}");
}

/// The types of a text of `api/`, those of modules included. An associated type is none: a type is
/// before its name.
fn exported_types(text: &str) -> BTreeSet<&str> {
    let kinds = ["struct ", "enum ", "trait ", "unsafe trait ", "union ", "type "];
    let items = text.lines().filter_map(|line| {
        let item =
            line.rsplit_once("] pub ").map_or(line.strip_prefix("pub "), |(_, item)| Some(item))?;
        let path = kinds.iter().find_map(|kind| item.strip_prefix(kind))?;
        let end = path.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
        path[..end.unwrap_or(path.len())].trim_end_matches(':').rsplit_once("::")
    });
    let in_module = |module: &str| {
        let last = module.rsplit("::").next().unwrap_or(module);
        last.starts_with(|c: char| c.is_lowercase())
    };
    items.filter(|(module, _)| in_module(module)).map(|(_, name)| name).collect()
}

#[test]
fn exported_types_are_understood() {
    let text = "#[non_exhaustive] pub enum c::m::A\npub struct c::B<T: c::X>\npub type c::B::Err = u8\n\
        pub use c::Other\npub fn c::m::f() -> c::m::C\npub trait c::D: core::marker::Send\n";
    assert_eq!(exported_types(text), ["A", "B", "D"].into());
}

#[test]
fn the_root_of_a_crate_is_read_at_a_glance() {
    let mut wrong = Vec::new();
    for sources in sources_of_public_crates() {
        let folder = workspace::root().join(&sources);
        let root = std::fs::read_to_string(folder.join("lib.rs")).unwrap();
        let modules = root_modules(&folder, &root);
        let count = root_names(&root).difference(&modules).count();
        let crate_ = sources.parent().unwrap().display();
        if count > AT_THE_ROOT {
            wrong.push(format!("{crate_} has {count}: move some into modules"));
        }
    }
    assert!(wrong.is_empty(), "names at the root:\n{}", wrong.join("\n"));
}

#[test]
fn modules_of_folders_are_no_names() {
    let core = workspace::root().join("dcp-core/src");
    let root =
        "pub use tensors::{device, dims};\npub use tensors::dims::Dims;\npub use names::key;";
    assert_eq!(root_modules(&core, root), ["device", "dims", "key"].map(String::from).into());
}

#[test]
fn names_at_a_root_are_understood() {
    let source = "//! Crate.\nmod a;\npub mod b;\npub use a::{A, c::{D, E as F}, // and\n    g,\n};\n\
        pub use dcp_core as core;\npub use a::X;\npub(crate) use a::Y;\n\
        pub async fn open() {}\npub struct S;\npub const C: u8 = 1;\n\
        pub mod jobs {\n    pub use crate::a::J;\n}\npub use a::Z;\n";
    assert_eq!(
        root_names(source),
        ["A", "C", "D", "F", "S", "X", "Z", "g", "open"].map(String::from).into()
    );
}
