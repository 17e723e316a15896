//! Phrases that STYLE.md bans from code, documentation, messages and help.

use xtask_host::workspace;

/// Words and phrases, each with what to write instead. They match whole words in any case.
const BANNED: &[(&str, &str)] = &[
    ("anew", "again, from the start; reset, recreate"),
    ("are given", "say where the value comes from: an option, an argument"),
    ("ask", "request, call"),
    ("asked", "requested"),
    ("asks", "requests, needs"),
    ("believe", "report, use"),
    ("believes", "reports, uses"),
    ("borne out", "confirmed, complete"),
    ("everybody", "every rank, every reader"),
    ("goes along", "is kept, is copied"),
    ("hears", "receives, reads"),
    ("in vain", "name the result"),
    ("is given", "say where the value comes from: an option, an argument"),
    ("is said to be", "is reported as"),
    ("is told", "receives"),
    ("knows", "has, contains, supports"),
    ("lies beside", "is in the same folder"),
    ("lies in", "is in"),
    ("lies outside", "is outside"),
    ("of no more use", "failed, closed"),
    ("somebody", "name the process or the user"),
    ("taken for", "recognized as"),
    ("tells", "shows, reports, distinguishes"),
    ("told", "reported, recorded"),
    ("vouch", "verify"),
    ("vouches", "verifies"),
    ("wants", "needs, requests"),
    ("was given", "say where the value comes from: an option, an argument"),
    ("were given", "say where the value comes from: an option, an argument"),
    ("what becomes of", "the state of, the treatment of"),
    ("what stands for", "name the thing"),
    ("without a word", "silently"),
];

/// Files that name the phrases to ban them.
const NAME_THEM: &[&str] = &["STYLE.md", "xtask/src/phrases.rs"];

/// Kinds of files that people of this project write.
const WRITTEN: &[&str] = &["rs", "md", "toml", "py"];

/// The banned phrases of a text, with their lines. A phrase that a line break cuts is found too.
fn banned(text: &str) -> Vec<(usize, &'static str)> {
    let (mut joined, mut starts) = (String::new(), Vec::new());
    for line in text.lines() {
        starts.push(joined.len());
        let line = line.trim().trim_start_matches(['/', '!', '#', '*']).trim_start();
        joined.push_str(&line.to_lowercase());
        joined.push(' ');
    }
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (phrase, _) in BANNED {
        for (at, _) in joined.match_indices(phrase) {
            let (before, behind) = (&joined[..at], &joined[at + phrase.len()..]);
            if !before.ends_with(is_word) && !behind.starts_with(is_word) {
                found.push((starts.partition_point(|start| *start <= at), *phrase));
            }
        }
    }
    found.sort_unstable();
    found
}

/// First words of a clause, which in a list of items shows nothing: `What is wrong with it.`
const CLAUSES: &[&str] = &["How ", "The same ", "Those ", "What ", "When ", "Where ", "Why "];

/// The lines of a Rust file at which documentation begins with a clause.
fn clauses(text: &str) -> Vec<usize> {
    let doc = |line: &str| {
        let line = line.trim_start();
        ["/// ", "//! "].iter().find_map(|mark| line.strip_prefix(mark)).map(str::to_owned)
    };
    let is_doc = |line: &str| ["///", "//!"].iter().any(|mark| line.trim_start().starts_with(mark));
    let mut found = Vec::new();
    let mut before = "";
    for (at, line) in text.lines().enumerate() {
        let is_first = !is_doc(before);
        let begins = |doc: String| CLAUSES.iter().any(|clause| doc.starts_with(clause));
        if is_first && doc(line).is_some_and(begins) {
            found.push(at + 1);
        }
        before = line;
    }
    found
}

/// Published crates document items with a noun or a verb. The documentation of the command's options is its
/// help, which is written as sentences.
#[test]
fn documentation_begins_with_a_noun_or_a_verb() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for file in workspace::files().unwrap() {
        let name = file.display().to_string();
        let (in_crate, inside) = name.split_once('/').unwrap_or_default();
        let is_checked = in_crate.starts_with("dcp")
            && !["dcp-cli", "dcp-testing"].contains(&in_crate)
            && inside.starts_with("src/")
            && name.ends_with(".rs");
        if !is_checked {
            continue;
        }
        let Ok(text) = std::fs::read_to_string(workspace::root().join(&file)) else { continue };
        count += 1;
        wrong.extend(clauses(&text).into_iter().map(|line| format!("{name}:{line}")));
    }
    assert!(count > 500, "{count} files");
    let all = wrong.join("\n");
    assert!(wrong.is_empty(), "first lines of documentation that begin with a clause:\n{all}");
}

#[test]
fn clauses_are_found_in_first_lines_alone() {
    let text =
        "/// What it is.\nstruct A;\n\n/// A shard.\n/// What is in it.\n//! How it works.\n";
    assert_eq!(clauses(text), [1]);
    assert_eq!(clauses("/// Whether it is.\n// What it is.\n"), [0_usize; 0]);
}

#[test]
fn no_banned_phrase_comes_back() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for file in workspace::files().unwrap() {
        let name = file.display().to_string();
        let is_written =
            file.extension().is_some_and(|kind| WRITTEN.iter().any(|written| kind == *written));
        if !is_written || NAME_THEM.contains(&&*name) || name.starts_with("fixtures/") {
            continue;
        }
        let Ok(text) = std::fs::read_to_string(workspace::root().join(&file)) else { continue };
        count += 1;
        for (line, phrase) in banned(&text) {
            let instead = BANNED.iter().find(|(banned, _)| *banned == phrase).unwrap().1;
            wrong.push(format!("{name}:{line}: {phrase:?}; better: {instead}"));
        }
    }
    assert!(count > 500, "{count} files");
    assert!(wrong.is_empty(), "phrases that STYLE.md bans:\n{}", wrong.join("\n"));
}

#[test]
fn phrases_are_found_across_lines() {
    let text = "/// A shard that lies\n/// in a file.\n// Nobody told `it_is_told`.\n";
    assert_eq!(banned(text), [(1, "lies in"), (3, "told")]);
    assert!(banned("retold tell knowsit").is_empty());
}
