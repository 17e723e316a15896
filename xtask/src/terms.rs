//! Messages of the library, which name setters and jobs and no options of the command.

use std::collections::BTreeSet;

use xtask_host::workspace;

/// Crates whose messages reach programs.
const LIBRARY: [&str; 14] = [
    "dcp-core",
    "dcp-planner",
    "dcp-formats",
    "dcp-storage-fs",
    "dcp-storage-cache",
    "dcp-engine",
    "dcp-trace",
    "dcp-jobs",
    "dcp-olmo",
    "dcp-peft",
    "dcp-deepspeed",
    "dcp-trainers",
    "dcp-mapping",
    "dcp-megatron",
];

/// Options of other programs, and styles of a page.
const OTHERS: [&str; 6] =
    ["--ckpt-format", "--exact", "--ntasks", "--profile", "--moe-layer-freq", "var(--"];

/// Setters in errors of plug-ins and trainers, which no command meets.
const OF_PROGRAMS: [&str; 4] = [
    "GlobalPlan::left_out",
    "Settings::cast",
    "ShardedTensor::builder",
    "ShardedTensor::from_rank_offsets",
];

/// The lines of code of the library, tests aside, with their places.
fn library() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for file in workspace::files().unwrap() {
        let name = file.display().to_string();
        let is_library = LIBRARY.iter().any(|package| name.starts_with(&format!("{package}/src/")));
        if !is_library || !name.ends_with(".rs") || name.ends_with("tests.rs") {
            continue;
        }
        let source = std::fs::read_to_string(workspace::root().join(&file)).unwrap();
        for (number, line) in crate::tidy::lines_before_tests(&source).enumerate() {
            if !line.trim_start().starts_with("//") {
                found.push((format!("{name}:{}", number + 1), line.to_owned()));
            }
        }
    }
    found
}

/// Whether a line has an option or a subcommand of a command line.
fn names_an_option(line: &str) -> bool {
    if OTHERS.iter().any(|other| line.contains(other)) {
        return false;
    }
    let is_option = |(at, _): (usize, &str)| {
        let before = line[..at].chars().next_back();
        let after = line[at + 2..].chars().next();
        after.is_some_and(|c| c.is_ascii_lowercase()) && before.is_none_or(|c| " `\"('".contains(c))
    };
    line.match_indices("--").any(is_option) || line.contains("`dcp ")
}

#[test]
fn messages_of_the_library_name_no_option_of_the_command() {
    let lines = library();
    assert!(lines.len() > 10_000, "{}", lines.len());
    let wrong: Vec<_> = lines.iter().filter(|(_, line)| names_an_option(line)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A setter or a job of which a message speaks, and a table of the command that lacks it, would reach a terminal
/// as it is.
#[test]
fn the_command_has_a_word_for_every_setter_in_a_message() {
    let table = std::fs::read_to_string(workspace::root().join("dcp-cli/src/terms.rs")).unwrap();
    let lines = library();
    let mut missing = BTreeSet::new();
    for (place, line) in &lines {
        for term in line.split('`').skip(1).step_by(2).filter(|term| is_setter(term)) {
            if !OF_PROGRAMS.contains(&term) && !table.contains(&format!("`{term}`")) {
                missing.insert(format!("{place}: {term}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// Whether a term is a path of Rust, such as `Keys::include`.
fn is_setter(term: &str) -> bool {
    let is_word = |word: &str| {
        !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    term.contains("::") && term.split("::").all(is_word)
}

#[test]
fn options_are_found() {
    assert!(names_an_option("with_hint(\"say --ranks\")"));
    assert!(names_an_option("\"`dcp ls` lists them\""));
    assert!(!names_an_option("a -- b"));
    assert!(!names_an_option("\"--ckpt-format torch\""));
    assert!(is_setter("Keys::include") && !is_setter("a b") && !is_setter("::"));
}
