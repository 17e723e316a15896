//! Workspaces outside of this one build in its target folder, and find compiled there what has the same
//! version. A dependency of another version is compiled once more, with everything that needs it.

use std::collections::{BTreeMap, BTreeSet};

use xtask_host::{Result, workspace};

const OTHERS: [&str; 6] =
    ["dcp-burn", "dcp-candle", "dcp-collectives-mpi", "dcp-python", "examples/plugins", "fuzz"];

/// The versions of each package in a lock file.
fn versions(folder: &str) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let text = std::fs::read_to_string(workspace::root().join(folder).join("Cargo.lock"))?;
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in text.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.strip_prefix(" = \"")?.strip_suffix('"')?.to_owned())
        };
        let (Some(name), Some(version)) = (field("name"), field("version")) else { continue };
        found.entry(name).or_default().insert(version);
    }
    Ok(found)
}

/// The part of a version that two compatible ones share.
fn line(version: &str) -> &str {
    let end = match version.split('.').position(|number| number != "0") {
        Some(at) => version.match_indices('.').nth(at).map(|(end, _)| end),
        None => None,
    };
    &version[..end.unwrap_or(version.len())]
}

#[test]
fn workspaces_outside_have_the_versions_of_this_one() {
    let here = versions(".").unwrap();
    let mut wrong = Vec::new();
    for folder in OTHERS {
        for (name, found) in versions(folder).unwrap() {
            let Some(known) = here.get(&name) else { continue };
            for version in found.difference(known) {
                let ours = known.iter().find(|known| line(known) == line(version));
                wrong.extend(ours.map(|ours| {
                    let ours = ours.split('+').next().unwrap_or_default();
                    format!(
                        "cargo update --manifest-path {folder}/Cargo.toml {name}@{version} \
                         --precise {ours}"
                    )
                }));
            }
        }
    }
    assert!(wrong.is_empty(), "run\n{}", wrong.join("\n"));
}

#[test]
fn compatible_versions_share_a_line() {
    assert_eq!(line("1.2.3"), line("1.9.0"));
    assert_eq!(line("0.2.3"), line("0.2.9"));
    assert_ne!(line("0.2.3"), line("0.3.3"));
    assert_ne!(line("0.0.3"), line("0.0.4"));
    assert_eq!(line("0.0.0"), "0.0.0");
}
