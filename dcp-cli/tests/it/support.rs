//! Running the command, and what the fixtures should hold.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use dcp::formats::safetensors::{Header, PREFIX_LEN, header_len};
use serde_json::Value;

/// What a run of the command left.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dcp"));
    command.current_dir(fixtures()).env_remove("DCP_LOG").env_remove("COLUMNS");
    command
}

/// Runs `dcp` in the folder of the fixtures.
pub(crate) fn dcp<A: AsRef<str>>(args: impl IntoIterator<Item = A>) -> Run {
    let args: Vec<String> = args.into_iter().map(|arg| arg.as_ref().to_owned()).collect();
    finish(command().args(args).output().unwrap())
}

pub(crate) fn finish(output: Output) -> Run {
    Run {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: without_progress(&String::from_utf8(output.stderr).unwrap()),
    }
}

/// What a command says but for how far it is. It says that of work that takes two seconds, which is any
/// work where the machine is busy.
pub(crate) fn without_progress(stderr: &str) -> String {
    let is_progress = |line: &str| {
        let found = line.split_once(": ").and_then(|(doing, rest)| {
            let (percent, rest) = rest.split_once("%, ")?;
            let is_work = !doing.is_empty() && doing.bytes().all(|byte| byte.is_ascii_lowercase());
            Some(is_work && percent.parse::<u8>().is_ok() && rest.contains("B/s, "))
        });
        found == Some(true)
    };
    stderr.split_inclusive('\n').filter(|line| !is_progress(line)).collect()
}

#[test]
fn what_a_slow_command_says_is_what_a_fast_one_says() {
    let said = "verifying: 0%, 154 B of 126 KiB, 4 B/s, 8h 20m left\nnote: verifying: 5%, not read\n\
                verifying: 100%, 126 KiB of 126 KiB, 45 MiB/s, in 47s\nerror: verifying: x";
    assert_eq!(without_progress(said), "note: verifying: 5%, not read\nerror: verifying: x");
}

impl Run {
    /// The output of a run that went well.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.stdout, self.stderr);
        self.stdout
    }

    #[track_caller]
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.ok()).unwrap()
    }

    /// The output of `inspect`, which shows what there is of a checkpoint that is not whole and fails with
    /// the reason.
    #[track_caller]
    pub(crate) fn not_whole(self, texts: &[&str]) -> String {
        assert_eq!(self.code, 1, "{}{}", self.stdout, self.stderr);
        for text in ["is not whole"].iter().chain(texts) {
            assert!(self.stderr.contains(text), "{text:?} is not in\n{}", self.stderr);
        }
        self.stdout
    }

    /// Expects a failure that says all of `texts` on stderr, and nothing on stdout.
    #[track_caller]
    pub(crate) fn fails(self, code: i32, texts: &[&str]) {
        assert_eq!(self.code, code, "{}{}", self.stdout, self.stderr);
        assert_eq!(self.stdout, "");
        let said = match serde_json::from_str::<Value>(&self.stderr) {
            Ok(json) => in_words(&json["error"]),
            Err(_) => self.stderr,
        };
        assert!(said.starts_with("error: "), "{said}");
        for text in texts {
            assert!(said.contains(text), "{text:?} is not in\n{said}");
        }
    }
}

/// An error as JSON, as it is without `--json`.
fn in_words(error: &Value) -> String {
    let mut said = format!("error: {}\n", error["message"].as_str().unwrap());
    for cause in error["causes"].as_array().unwrap() {
        said.push_str(&format!("  caused by: {}\n", cause.as_str().unwrap()));
    }
    if let Some(hint) = error["hint"].as_str() {
        said.push_str(&format!("hint: {hint}\n"));
    }
    said
}

pub(crate) fn fixtures() -> PathBuf {
    dcp_testing::fixture("pytorch")
}

/// Every checkpoint among the fixtures.
pub(crate) fn all_fixtures() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(fixtures())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("expected.json").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() > 30, "{names:?}");
    names
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub(crate) fn expected(fixture: &str) -> Value {
    read_json(&fixtures().join(fixture).join("expected.json"))
}

/// The tensors of a safetensors file: dtype, shape and bytes by name.
pub(crate) fn tensors(path: &Path) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let file = fs::read(path).unwrap();
    let len = header_len(&file, file.len() as u64).unwrap();
    let start = usize::try_from(PREFIX_LEN + len).unwrap();
    let (head, data) = file.split_at(start);
    let header = Header::parse(&head[8..], data.len() as u64).unwrap();
    let all = header.tensors().map(|(name, info)| {
        let range = info.byte_range.start as usize..info.byte_range.end as usize;
        (name.to_string(), (info.dtype.to_string(), info.shape.to_vec(), data[range].to_vec()))
    });
    all.collect()
}

pub(crate) fn expected_tensors(fixture: &str) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    tensors(&fixtures().join(fixture).join("expected.safetensors"))
}

/// Compares tensors with those that a fixture should hold. A type that the fixture's file
/// cannot name is there as bare bytes, so only the bytes are compared.
#[track_caller]
pub(crate) fn assert_same_tensors(
    found: &BTreeMap<String, (String, Vec<u64>, Vec<u8>)>,
    fixture: &str,
) {
    let (description, wanted) = (expected(fixture), expected_tensors(fixture));
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>(), "{fixture}");
    for (name, (dtype, shape, bytes)) in &wanted {
        let (found_dtype, found_shape, found_bytes) = &found[name];
        assert_eq!(found_bytes, bytes, "{fixture} {name}");
        if description["tensors"][name]["encoding"] == "native" {
            assert_eq!((found_dtype, found_shape), (dtype, shape), "{fixture} {name}");
        }
    }
}

/// A copy of a fixture that may be damaged.
pub(crate) fn copy_of(fixture: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixtures().join(fixture)).unwrap() {
        let entry = entry.unwrap();
        if !entry.file_name().to_string_lossy().starts_with("expected") {
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    folder
}

pub(crate) fn path(folder: &tempfile::TempDir, name: &str) -> String {
    folder.path().join(name).display().to_string()
}
