//! Modules of a crate that need each other in a circle, so that none is read without the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::tidy::{lines_before_tests, rust_sources};

/// The top-level modules of a crate, and which others each one names.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// What is named behind `crate::`, `{…}` lists included.
fn named(source: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for behind in source.split("crate::").skip(1) {
        let Some(list) = behind.strip_prefix('{') else {
            names.insert(word(behind));
            continue;
        };
        let mut depth = 0_usize;
        let mut starts = true;
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => starts = true,
                c if starts && !c.is_whitespace() => {
                    names.insert(word(&list[at..]));
                    starts = false;
                }
                _ => {}
            }
        }
    }
    names
}

/// What the root of a crate exports of its modules: each name with its module. Behind `crate::`, such a
/// name is a use of that module.
fn exported(root: &str) -> BTreeMap<String, String> {
    let code: Vec<&str> =
        lines_before_tests(root).map(|line| line.split("//").next().unwrap_or(line)).collect();
    let code = code.join("\n");
    let uses = code.split(';').filter_map(|item| item.rsplit_once("use ")?.1.split_once("::"));
    let mut exported = BTreeMap::new();
    for (module, names) in uses {
        let paths = names.split(['{', '}', ',']).map(str::trim);
        for path in paths.filter(|path| !path.is_empty() && !path.ends_with("::")) {
            let name = path.rsplit([' ', ':']).next().unwrap_or(path);
            exported.entry(name.to_owned()).or_insert_with(|| module.to_owned());
        }
    }
    exported
}

fn word(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The modules of each crate but those of tests. What only tests name does not count.
fn crates() -> BTreeMap<String, Uses> {
    let mut crates: BTreeMap<String, Uses> = BTreeMap::new();
    let sources = rust_sources();
    let of_tests = |name: &str, module: &str| {
        let declared = format!("#[cfg(test)]\nmod {module};");
        let roots = ["lib", "main"].map(|root| format!("{name}/src/{root}.rs"));
        sources.iter().any(|(file, source)| {
            roots.iter().any(|root| file == Path::new(root)) && source.contains(&declared)
        })
    };
    for (file, source) in &sources {
        let file = file.to_string_lossy().into_owned();
        let Some((name, path)) = file.split_once("/src/") else { continue };
        let module = path.split('/').next().unwrap_or(path).trim_end_matches(".rs");
        if name.contains('/')
            || file.ends_with("/tests.rs")
            || matches!(module, "lib" | "main")
            || of_tests(name, module)
        {
            continue;
        }
        let code: Vec<&str> = lines_before_tests(source)
            .map(|line| line.split("//").next().unwrap_or(line))
            .collect();
        let uses = crates.entry(name.to_owned()).or_default();
        uses.entry(module.to_owned()).or_default().extend(named(&code.join("\n")));
    }
    for (name, uses) in &mut crates {
        let root = Path::new(name).join("src/lib.rs");
        let root = sources.iter().find(|(file, _)| *file == root).map_or("", |(_, root)| root);
        let exported = exported(root);
        for named in uses.values_mut() {
            *named = named.iter().map(|name| exported.get(name).unwrap_or(name).clone()).collect();
        }
        let modules: BTreeSet<String> = uses.keys().cloned().collect();
        for (module, named) in uses.iter_mut() {
            named.retain(|name| name != module && modules.contains(name));
        }
    }
    crates
}

/// All that `from` needs, directly or through others.
fn reach<'a>(uses: &'a Uses, from: &'a str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        for next in uses.get(module).into_iter().flatten() {
            if reached.insert(next.as_str()) {
                open.push(next);
            }
        }
    }
    reached
}

/// The largest sets of modules of which each needs every other one.
fn circles(uses: &Uses) -> BTreeSet<Vec<&str>> {
    let reached: BTreeMap<&str, _> =
        uses.keys().map(|module| (module.as_str(), reach(uses, module))).collect();
    let circle = |module: &&str| -> Vec<&str> {
        let around = |other: &&&str| reached[**other].contains(module);
        reached[module].iter().filter(around).copied().collect()
    };
    reached.keys().map(circle).filter(|circle| circle.len() > 1).collect()
}

#[test]
fn modules_need_each_other_in_no_circle() {
    let crates = crates();
    assert!(crates.len() > 15, "{} crates", crates.len());
    let found: BTreeSet<(&str, Vec<&str>)> = crates
        .iter()
        .flat_map(|(name, uses)| circles(uses).into_iter().map(|one| (name.as_str(), one)))
        .collect();
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn circles_are_found_through_lists() {
    let source = "use crate::{a::{X, y}, b, self};\nfn f() { crate::c::g() }";
    assert_eq!(named(source), ["a", "b", "c", "self"].map(String::from).into());
    let root = "pub use a::{b, c::{D, E as F}};\npub(crate) use g::h;";
    let modules = [("D", "a"), ("F", "a"), ("b", "a"), ("h", "g")];
    let modules = modules.map(|(name, module)| (name.to_owned(), module.to_owned()));
    assert_eq!(exported(root), modules.into());
    let uses = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let modules =
        [("a", uses(&["b"])), ("b", uses(&["c"])), ("c", uses(&["a"])), ("d", uses(&["a"]))];
    let modules: Uses = modules.map(|(name, uses)| (name.to_owned(), uses)).into();
    assert_eq!(circles(&modules), [vec!["a", "b", "c"]].into());
}
