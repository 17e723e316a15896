//! The order in which `cargo publish --workspace` uploads the published crates: there is one.
//!
//! crates.io takes a crate after every other one that its manifest names with a version, dev-dependencies included.
//! `cargo package` without lock files does not look for the order.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use xtask_host::workspace::{self, list, text};

/// The published crates that each one's package names.
fn named(metadata: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let published: BTreeSet<String> = workspace::packages()
        .unwrap()
        .into_iter()
        .filter(|package| package.is_published)
        .map(|package| package.name)
        .collect();
    let packages = list(metadata, "packages").iter();
    let packages = packages.filter(|package| published.contains(text(package, "name")));
    let of_package = |package: &Value| {
        let dependencies = list(package, "dependencies").iter();
        // A dependency by path alone is left out of a package.
        let named = dependencies.filter(|to| text(to, "req") != "*");
        let names = named.map(|to| text(to, "name").to_owned());
        names.filter(|name| published.contains(name)).collect()
    };
    packages.map(|package| (text(package, "name").to_owned(), of_package(package))).collect()
}

/// Removes crates that need none of those left, until there is none; returns those that need each other.
fn without_order(mut left: BTreeMap<String, BTreeSet<String>>) -> BTreeSet<String> {
    loop {
        let names: BTreeSet<String> = left.keys().cloned().collect();
        left.retain(|_, needed| !needed.is_disjoint(&names));
        if left.len() == names.len() {
            return names;
        }
    }
}

#[test]
fn published_crates_have_an_order() {
    let named = named(&workspace::resolved().unwrap());
    assert!(named.len() > 15, "{named:?}");
    let circle = without_order(named);
    assert!(circle.is_empty(), "none of these can be published before the others: {circle:?}");
}

#[test]
fn crates_that_need_each_other_have_no_order() {
    let of = |needed: &[(&str, &[&str])]| {
        let one = |(name, needs): &(&str, &[&str])| {
            ((*name).to_owned(), needs.iter().map(|need| (*need).to_owned()).collect())
        };
        without_order(needed.iter().map(one).collect())
    };
    assert!(of(&[("a", &[]), ("b", &["a"]), ("c", &["a", "b"])]).is_empty());
    assert_eq!(of(&[("a", &[]), ("b", &["a", "c"]), ("c", &["b"])]).len(), 2);
}
