//! RELIABILITY.md: each of PyTorch's traps has a test that carries its name, and each promise
//! names tests that exist.

use std::collections::BTreeMap;

use xtask_host::workspace;

const DOCUMENT: &str = "RELIABILITY.md";

/// Traps T1–T23 lose or corrupt data in PyTorch itself, F1–F19 trip readers of its files.
const TRAPS: &[(char, u32)] = &[('T', 23), ('F', 19)];

/// M1–M21 are Megatron-Core's; some have no bearing on files and so no row.
const SOME: char = 'M';

/// A row: the trap, and the tests of its last column as `(crate, function)`.
struct Row {
    trap: String,
    tests: Vec<(String, String)>,
}

/// Rows `| T1 | what happens | what we do | crate::test_name |`, several tests separated by
/// anything that is not part of a name.
fn rows(text: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    for line in text.lines() {
        let Some(inner) = line.trim().strip_prefix('|') else { continue };
        let cells: Vec<&str> = inner.trim_end_matches('|').split('|').map(str::trim).collect();
        let (Some(trap), Some(tests)) = (cells.first(), cells.last()) else { continue };
        let trap = trap.trim_matches('*');
        let mut kinds = TRAPS.iter().map(|(kind, _)| *kind).chain([SOME]);
        let is_trap = kinds.any(|kind| {
            trap.strip_prefix(kind).is_some_and(|number| number.parse::<u32>().is_ok())
        });
        if !is_trap {
            continue;
        }
        rows.push(Row { trap: trap.to_owned(), tests: named(tests) });
    }
    rows
}

/// The tests that a text names as `crate::test`, separated by anything that is not part of a name.
fn named(text: &str) -> Vec<(String, String)> {
    let of_a_name = |c: char| c.is_ascii_alphanumeric() || "_:-".contains(c);
    text.split(|c| !of_a_name(c))
        .filter_map(|path| Some((path.split_once("::")?.0, path.rsplit_once("::")?.1)))
        .map(|(package, test)| (package.replace('_', "-"), test.to_owned()))
        .collect()
}

/// The promises: the title of each, and the tests named behind the words "Held by".
fn promises(text: &str) -> Vec<Row> {
    let section = text.split("\n## ").find(|section| section.starts_with("Promises\n"));
    let items = section.unwrap_or_default().split("\n- **").skip(1);
    let promise = |item: &str| {
        let held_by = item.replace("\n  ", " ");
        let tests = held_by.split_once("Held by ").map(|(_, tests)| tests);
        let title = item.split_once("**").map_or(item, |(title, _)| title).to_owned();
        // A sentence ends the list; names of crates and tests hold no dot.
        let tests = tests.and_then(|tests| tests.split('.').next()).unwrap_or_default();
        Row { trap: title, tests: named(tests) }
    };
    items.map(promise).collect()
}

/// The folder of each crate, by package and by itself.
fn folders() -> BTreeMap<String, String> {
    let packages = workspace::packages().unwrap().into_iter();
    packages
        .flat_map(|package| {
            let dir = package.dir.display().to_string();
            [(package.name, dir.clone()), (dir.clone(), dir)]
        })
        .collect()
}

/// The tests of a row that are not there.
fn gone(row: &Row, tests: &BTreeMap<String, Vec<String>>) -> Vec<String> {
    let folders = folders();
    let is_there = |(package, test): &&(String, String)| {
        let found = folders.get(package).zip(tests.get(test));
        found.is_some_and(|(folder, found)| found.contains(folder))
    };
    let gone = row.tests.iter().filter(|named| !is_there(named));
    gone.map(|(package, test)| format!("{}: no test {test} in {package}", row.trap)).collect()
}

/// `t01` for T1, `trap_01` for M1: the word that the name of its tests starts with.
fn word(trap: &str) -> String {
    let (kind, number) = trap.split_at(1);
    let number = number.parse::<u32>().unwrap_or_default();
    match kind.starts_with(SOME) {
        true => format!("trap_{number:02}"),
        false => format!("{}{number:02}", kind.to_lowercase()),
    }
}

/// Every test function of the workspace: name to the folders of the crates that have it.
fn tests() -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in workspace::files().unwrap() {
        if file.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let folder = file.iter().next().unwrap().to_string_lossy().into_owned();
        let source = std::fs::read_to_string(workspace::root().join(&file)).unwrap();
        let mut is_test = false;
        for line in source.lines().map(str::trim) {
            if let Some(attribute) = line.strip_prefix("#[") {
                is_test |= attribute.contains("test]") || attribute.contains("test(");
            } else if let Some((_, rest)) = line.split_once("fn ") {
                let name = rest.split(|c: char| c != '_' && !c.is_ascii_alphanumeric()).next();
                if let Some(name) = name.filter(|_| is_test) {
                    found.entry(name.to_owned()).or_default().push(folder.clone());
                }
                is_test = false;
            }
        }
    }
    found
}

#[test]
fn every_trap_has_its_test() {
    let text = std::fs::read_to_string(workspace::root().join(DOCUMENT))
        .unwrap_or_else(|error| panic!("{DOCUMENT} holds the table of traps: {error}"));
    let rows = rows(&text);
    let tests = tests();
    let mut wrong = Vec::new();
    for (kind, last) in TRAPS {
        for trap in (1..=*last).map(|number| format!("{kind}{number}")) {
            let of_it: Vec<&Row> = rows.iter().filter(|row| row.trap == trap).collect();
            if of_it.len() != 1 {
                wrong.push(format!("{trap} has {} rows", of_it.len()));
            }
            if of_it.iter().any(|row| row.tests.is_empty()) {
                wrong.push(format!("{trap} names no test"));
            }
        }
    }
    for (at, row) in rows.iter().enumerate() {
        if rows.iter().take(at).any(|earlier| earlier.trap == row.trap) {
            wrong.push(format!("{} has several rows", row.trap));
        }
        let word = word(&row.trap);
        if !row.tests.is_empty() && !row.tests.iter().any(|(_, test)| test.contains(&word)) {
            wrong.push(format!("{}: no test with {word} in its name", row.trap));
        }
        wrong.extend(gone(row, &tests));
    }
    assert!(wrong.is_empty(), "{DOCUMENT}:\n{}", wrong.join("\n"));
}

#[test]
fn every_promise_has_its_tests() {
    let text = std::fs::read_to_string(workspace::root().join(DOCUMENT)).unwrap();
    let (promises, tests) = (promises(&text), tests());
    assert!(promises.len() > 10, "{DOCUMENT} has {} promises", promises.len());
    let without = promises.iter().filter(|promise| promise.tests.is_empty());
    let mut wrong: Vec<_> = without.map(|row| format!("{} names no test", row.trap)).collect();
    wrong.extend(promises.iter().flat_map(|promise| gone(promise, &tests)));
    assert!(wrong.is_empty(), "{DOCUMENT}:\n{}", wrong.join("\n"));
}

#[test]
fn promises_are_understood() {
    let text = "# R\n\n## Promises\n\n- **One.** It holds. Held by a::x,\n  b-c::y and d::z. More.\n\
        - **Two.** `std::process::exit` runs nothing.\n\n## Next\n\n- **Three.** Held by e::f.\n";
    let promises = promises(text);
    assert_eq!(promises.len(), 2);
    let expected = [("a", "x"), ("b-c", "y"), ("d", "z")];
    assert_eq!(promises[0].tests, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    assert_eq!((&*promises[1].trap, promises[1].tests.len()), ("Two.", 0));
}

#[test]
fn rows_of_the_table_are_understood() {
    let table = "| trap | PyTorch | here | test |\n|---|---|---|---|\n\
        | T1 | loses threads | does not | `dcp_engine::tests::t01_lost`, dcp-core::t01_more |\n\
        | F19 | order | any | `dcp-formats::f19_order` |\n| Total | | | 2 |\n";
    let rows = rows(table);
    assert_eq!(rows.len(), 2);
    let expected = [("dcp-engine", "t01_lost"), ("dcp-core", "t01_more")];
    assert_eq!(rows[0].tests, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    assert_eq!((rows[1].trap.as_str(), word(&rows[1].trap)), ("F19", "f19".to_owned()));
    assert_eq!(word("M4"), "trap_04");
}

#[test]
fn test_functions_are_found() {
    assert!(tests()["test_functions_are_found"].contains(&"xtask".to_owned()));
    assert!(!tests().contains_key("word"));
}
