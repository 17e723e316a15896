//! Habits of this tree that a compiler does not check.

use std::path::{Path, PathBuf};

use xtask_host::workspace;

/// Lines of one file, tests not counted. A longer one is probably two ideas.
const LONGEST_FILE: usize = 500;

/// Files that may be longer, each with its reason.
const MAY_BE_LONGER: &[(&str, &str)] = &[];

/// Documents that list the crates, and whether all of them: a user has no business with those that are
/// not published.
const CRATE_MAPS: &[(&str, bool)] =
    &[("docs/reference/features.md", false), ("ARCHITECTURE.md", true)];

/// The lines in front of the test module, which is the last thing of a file here.
pub(crate) fn lines_before_tests(source: &str) -> std::str::Lines<'_> {
    let starts = ["\n#[cfg(test)]\nmod tests {", "\n#[cfg(test)]\npub(crate) mod tests {"];
    let end = starts.iter().filter_map(|start| source.find(start)).min().unwrap_or(source.len());
    source[..end].lines()
}

pub(crate) fn rust_sources() -> Vec<(PathBuf, String)> {
    let files = workspace::files().unwrap();
    let rust = files.into_iter().filter(|file| file.extension().is_some_and(|e| e == "rs"));
    rust.map(|file| {
        let source = std::fs::read_to_string(workspace::root().join(&file)).unwrap();
        (file, source)
    })
    .collect()
}

#[test]
fn every_module_opens_with_what_it_is() {
    let silent: Vec<_> = rust_sources()
        .into_iter()
        .filter(|(_, source)| !source.starts_with("//!") && !source.starts_with("#![doc = "))
        .map(|(file, _)| file.display().to_string())
        .collect();
    assert!(silent.is_empty(), "no //! on the first line:\n{}", silent.join("\n"));
}

#[test]
fn no_file_holds_more_than_one_idea() {
    let mut long = Vec::new();
    for (file, source) in rust_sources() {
        let lines = lines_before_tests(&source).count();
        let exempt = MAY_BE_LONGER.iter().any(|(path, _)| file == Path::new(path));
        if lines > LONGEST_FILE && !exempt {
            long.push(format!("{lines} lines: {}", file.display()));
        }
    }
    assert!(long.is_empty(), "over {LONGEST_FILE} lines before tests:\n{}", long.join("\n"));
}

#[test]
fn nothing_is_left_undone() {
    // Spelled in two halves, so that this file does not find itself.
    let marks = [
        concat!("todo", "!("),
        concat!("unimplement", "ed!("),
        concat!("FIX", "ME"),
        concat!("TO", "DO"),
        concat!("XX", "X"),
        concat!("#[ig", "nore"),
    ];
    let mut found = Vec::new();
    for (file, source) in rust_sources() {
        for (number, line) in source.lines().enumerate() {
            if marks.iter().any(|mark| line.contains(mark)) {
                found.push(format!("{}:{}: {}", file.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn no_paths_of_a_developers_machine() {
    let machine = [concat!("/", "work/"), concat!("/", "root/"), concat!("/", "farm/")];
    let mut found = Vec::new();
    for file in workspace::files().unwrap() {
        // Checkpoints of PyTorch hold the folder they were first saved to; those are not text.
        let Ok(text) = std::fs::read_to_string(workspace::root().join(&file)) else { continue };
        for (number, line) in text.lines().enumerate() {
            let starts =
                |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '.');
            if machine.iter().any(|path| line.match_indices(path).any(|(at, _)| starts(at))) {
                found.push(format!("{}:{}", file.display(), number + 1));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn crate_maps_are_complete() {
    let crates: Vec<(String, bool)> = workspace::packages()
        .unwrap()
        .into_iter()
        .map(|package| (package.dir.display().to_string(), package.is_published))
        .collect();
    let mut wrong = Vec::new();
    for (document, all) in CRATE_MAPS {
        let Ok(text) = std::fs::read_to_string(workspace::root().join(document)) else { continue };
        for (dir, _) in crates.iter().filter(|(_, is_published)| *all || *is_published) {
            if ![format!("`{dir}`"), format!("{dir}/")].iter().any(|name| text.contains(name)) {
                wrong.push(format!("{document} does not mention {dir}"));
            }
        }
        for listed in text.lines().filter_map(first_cell).filter(|cell| cell.starts_with("dcp-")) {
            // Some crates are workspaces of their own.
            if !workspace::root().join(listed).join("Cargo.toml").exists() {
                wrong.push(format!("{document} lists {listed}, which is not a crate"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A name without a folder is in the folder of the one before it in the row.
#[test]
fn every_place_of_the_way_is_there() {
    let text = std::fs::read_to_string(workspace::root().join("ARCHITECTURE.md")).unwrap();
    let (_, way) = text.split_once("\n## Where do I change …\n").unwrap();
    let mut wrong = Vec::new();
    for row in way.lines().filter_map(|line| line.strip_prefix('|')) {
        let places = row.split('|').nth(1).unwrap_or_default();
        let mut beside = PathBuf::new();
        for place in places.split('`').skip(1).step_by(2) {
            let is_whole = place.starts_with("dcp");
            let path = if is_whole { PathBuf::from(place) } else { beside.join(place) };
            // For a pattern, the folder.
            let known =
                if place.contains('*') { path.parent().unwrap().into() } else { path.clone() };
            if !workspace::root().join(known).exists() {
                wrong.push(path.display().to_string());
            }
            if is_whole {
                beside = path.parent().unwrap().into();
            }
        }
    }
    assert!(wrong.is_empty(), "ARCHITECTURE.md sends readers to what is not there: {wrong:?}");
}

/// Every feature has a row where its package documents features, and no other row is there.
#[test]
fn tables_of_features_are_those_of_the_manifests() {
    const TABLES: [(&str, &str, &str); 3] = [
        ("distcp", "docs/reference/features.md", "## Features of the package `distcp`"),
        ("distcp", "dcp/src/lib.rs", "# Features"),
        ("dcp-formats", "docs/reference/features.md", "## Features of `dcp-formats`"),
    ];
    let packages = workspace::packages().unwrap();
    for (name, document, head) in TABLES {
        let text = std::fs::read_to_string(workspace::root().join(document)).unwrap();
        let (_, section) = text.split_once(&format!("{head}\n")).unwrap();
        let lines = section.lines().map(|line| line.trim_start_matches("//! "));
        let rows =
            lines.take_while(|line| !line.starts_with('#')).filter(|line| line.contains('|'));
        let cells = rows.map(|row| row.split('|').nth(1).unwrap_or_default());
        let mut listed: Vec<&str> =
            cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        listed.sort_unstable();
        let package = packages.iter().find(|package| package.name == name).unwrap();
        assert_eq!(listed, package.features, "{document} and the features of {name}");
    }
}

/// Scripts and tables of xtask's commands, which no compiler looks for.
#[test]
fn files_that_commands_name_are_there() {
    let mut missing = Vec::new();
    let mut found = 0;
    for (file, source) in rust_sources() {
        let Some(package) = file.ancestors().find(|dir| dir.ends_with("src")) else { continue };
        if !file.starts_with("xtask") {
            continue;
        }
        let scripts = package.with_file_name("python");
        for text in source.split('"').skip(1).step_by(2) {
            let path = match text {
                whole if whole.starts_with("xtask/") => PathBuf::from(whole),
                name if name.ends_with(".py") && !name.contains('/') => scripts.join(name),
                _ => continue,
            };
            found += 1;
            if !workspace::root().join(&path).exists() {
                missing.push(format!("{}: {}", file.display(), path.display()));
            }
        }
    }
    assert!(found > 20, "{found} files");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// A row behind a blank line is no row of the table before it: it is shown as text.
#[test]
fn tables_are_whole() {
    let files = workspace::files().unwrap();
    let mut cut = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|e| e == "md")) {
        let text = std::fs::read_to_string(workspace::root().join(file)).unwrap();
        let cut_rows = rows_without_table(&text);
        cut.extend(cut_rows.into_iter().map(|line| format!("{}:{line}", file.display())));
    }
    assert!(cut.is_empty(), "rows that no head of a table precedes: {cut:?}");
}

/// The numbers of lines that start rows without a head.
fn rows_without_table(text: &str) -> Vec<usize> {
    let lines: Vec<&str> = text.lines().collect();
    let is_row = |at: usize| lines.get(at).is_some_and(|line| line.starts_with('|'));
    let is_ruler = |at: usize| {
        lines
            .get(at)
            .is_some_and(|line| line.contains('-') && line.chars().all(|c| "|-: ".contains(c)))
    };
    let starts = (0..lines.len()).filter(|at| is_row(*at) && (*at == 0 || !is_row(*at - 1)));
    starts.filter(|at| !is_ruler(*at + 1)).map(|at| at + 1).collect()
}

#[test]
fn cut_tables_are_found() {
    let table = "| a | b |\n|---|:-:|\n| 1 | 2 |\n";
    assert!(rows_without_table(table).is_empty());
    assert_eq!(rows_without_table(&format!("{table}\n| 3 | 4 |\n| 5 | 6 |\n")), [5]);
}

/// The name that a table row starts with, as a code span or a link of one.
fn first_cell(line: &str) -> Option<&str> {
    let cell = line.strip_prefix('|')?.split('|').next()?.trim();
    let code = cell.trim_start_matches('[').strip_prefix('`')?;
    Some(code.split('`').next()?.trim_end_matches('/'))
}

#[test]
fn rows_of_a_crate_map() {
    assert_eq!(first_cell("| `dcp-core/` | vocabulary |"), Some("dcp-core"));
    assert_eq!(first_cell("| [`dcp-core`](dcp-core) | vocabulary |"), Some("dcp-core"));
    assert_eq!(first_cell("| a crate | what |"), None);
    assert_eq!(first_cell("`dcp-core` is not a row"), None);
}
