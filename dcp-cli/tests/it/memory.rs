//! Memory of the real process does not grow with the checkpoint, nor with its largest tensor.

#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use dcp::DType;
use dcp::formats::safetensors::{SafetensorsItem, encode_header};
use nix::sys::resource::{UsageWho, getrusage};

use crate::support::{command, path};

const MIB: u64 = 1 << 20;
/// Given to every run.
const BUDGET: u64 = 64 * MIB;
/// What no run may exceed: the budget, what the storage has on its way, and the program itself.
const CEILING: u64 = 128 * MIB;
/// A checkpoint of this size shows what the program itself needs.
const TINY: u64 = MIB;
/// By how much two runs of the same command may differ: pages of code, and threads' arenas.
const NOISE: u64 = 16 * MIB;

/// A file of so many bytes of tensors, half of them in one; mostly holes, so it is quickly made.
fn source(file: &Path, bytes: u64) {
    let item = |name: &str, rows: u64| SafetensorsItem {
        name: name.into(),
        dtype: DType::Float32,
        shape: [rows, 1 << 10].as_slice().into(),
    };
    let rows = bytes / (4 << 10);
    let mut items = vec![item("large", rows / 2)];
    items.extend((0..8).map(|n| item(&format!("layers.{n}.weight"), rows / 16)));
    let header = encode_header(&items, &Default::default()).unwrap();
    let mut out = File::create(file).unwrap();
    out.write_all(&header.bytes).unwrap();
    out.set_len(header.byte_len).unwrap();
}

/// Runs a command and returns the most bytes of memory that it had.
fn peak(args: &[&str]) -> u64 {
    let (code, peak) = outcome(args);
    assert!(code.success(), "{args:?}: {code}");
    assert!(peak > MIB, "{args:?}: {peak} bytes");
    peak
}

/// How a command ends, and the most bytes of memory that it had.
pub(crate) fn outcome(args: &[&str]) -> (ExitStatus, u64) {
    outcome_into(args, Stdio::null())
}

const ARGS: &str = "DCP_TEST_MEASURED_ARGS";
const PEAK: &str = "DCP_TEST_MEASURED_PEAK";

/// The same, with its output there, among some lines of the test harness.
///
/// The system reports the peak of all children of a process together, so each command is the only
/// child of a process of its own.
pub(crate) fn outcome_into(args: &[&str], stdout: impl Into<Stdio>) -> (ExitStatus, u64) {
    let peak = tempfile::NamedTempFile::new().unwrap();
    let code = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "memory::a_measured_command", "--nocapture", "--quiet"])
        .env(ARGS, args.join("\n"))
        .env(PEAK, peak.path())
        .stdout(stdout)
        .status()
        .unwrap();
    (code, fs::read_to_string(peak.path()).unwrap().parse().unwrap())
}

/// What the process does that measures a command; in the test itself, nothing.
#[test]
fn a_measured_command() {
    let Ok(args) = std::env::var(ARGS) else { return };
    let code = command().args(args.split('\n')).status().unwrap();
    let kibibytes = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    let peak = u64::try_from(kibibytes).unwrap() << 10;
    fs::write(std::env::var_os(PEAK).unwrap(), peak.to_string()).unwrap();
    std::process::exit(code.code().unwrap_or(255));
}

/// A folder with a checkpoint of so many bytes, as one file and as three ranks save it, and the
/// peak of the command that made the latter.
fn checkpoint(bytes: u64) -> (tempfile::TempDir, u64) {
    let folder = tempfile::tempdir().unwrap();
    let (file, saved) = (path(&folder, "in.safetensors"), path(&folder, "saved"));
    source(file.as_ref(), bytes);
    let peak = run(&["reshard", &file, &saved, "--ranks", "3"]);
    (folder, peak)
}

fn run(args: &[&str]) -> u64 {
    peak(&[args, &["--max-memory", "64MiB", "--overwrite", "--quiet"]].concat())
}

/// What goes on whole stretches of bytes, with sizes beyond what a run may hold.
fn copying(bytes: u64) -> Vec<(&'static str, u64)> {
    let (folder, reshard) = checkpoint(bytes);
    let (saved, out) = (path(&folder, "saved"), path(&folder, "out.safetensors"));
    let convert = run(&["convert", &saved, &out]);
    vec![("reshard", reshard), ("convert", convert)]
}

/// What computes element by element, which takes its time where the compiler does not optimize.
fn computing(bytes: u64) -> Vec<(&'static str, u64)> {
    let (folder, _) = checkpoint(bytes);
    let (file, saved) = (path(&folder, "in.safetensors"), path(&folder, "saved"));
    let out = path(&folder, "out.safetensors");
    let average = run(&["average", &saved, &file, "--out", &out, "--dtype", "bf16"]);
    vec![("average", average)]
}

fn compare(program: Vec<(&str, u64)>, large: Vec<(&str, u64)>) {
    for ((what, program), (_, large)) in program.into_iter().zip(large) {
        assert!(large <= CEILING, "{what}: {} MiB", large / MIB);
        let limit = program + BUDGET + NOISE;
        assert!(large <= limit, "{what}: {large} bytes, above {limit} ({program} for the program)");
    }
}

#[test]
fn memory_is_bounded_whatever_the_size() {
    compare(copying(TINY), copying(320 * MIB));
    compare(computing(TINY), computing(80 * MIB));
}
