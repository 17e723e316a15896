//! Speeds, ours beside PyTorch's, from one run on one machine.
//!
//! The Rust half is `dcp/examples/bench.rs`, PyTorch's is `xtask/python/bench.py`. Every
//! measurement is a process of its own that prints seconds; the median of three counts. Files on
//! disk are dropped from the page cache before they are read.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use crate::process::{Scratch, output};
use crate::{Result, interop, process, venv, workspace};

const RUNS: usize = 3;
const STARTS: usize = 9;

/// Prints the table.
pub(crate) fn main(args: &[&str]) -> Result {
    let mut gib = 2_u64;
    let mut disk = workspace::target()?;
    let mut tmpfs = PathBuf::from("/dev/shm");
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let value = args.next().ok_or_else(|| format!("{arg} needs a value"))?;
        match *arg {
            "--gib" => gib = value.parse()?,
            "--disk" => disk = PathBuf::from(value),
            "--tmpfs" => tmpfs = PathBuf::from(value),
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let bench =
        Bench { python: venv::python(venv::NEWEST)?, rust: interop::example("bench", true)?, gib };
    let command = command_line_tool()?;

    let mut rows = Vec::new();
    for (place, folder, cold) in [("tmpfs", &tmpfs, false), ("disk", &disk, true)] {
        let scratch = Scratch::new(folder, "dcp-bench", false)?;
        bench.speeds(place, scratch.path(), cold, &mut rows)?;
    }
    let scratch = Scratch::new(&tmpfs, "dcp-bench", false)?;
    bench.slices(scratch.path(), &mut rows)?;
    bench.start_up(&command, &mut rows)?;

    println!("\n{}\n", machine());
    println!("| what | ours | PyTorch {} | plain system calls |", venv::NEWEST);
    println!("|---|---:|---:|---:|");
    for row in rows {
        println!("| {} | {} | {} | {} |", row.what, row.ours, row.torch, row.limit);
    }
    Ok(())
}

struct Row {
    what: String,
    ours: String,
    torch: String,
    limit: String,
}

struct Bench {
    python: PathBuf,
    rust: PathBuf,
    gib: u64,
}

impl Bench {
    /// Save and load in GB/s.
    fn speeds(&self, place: &str, folder: &Path, cold: bool, rows: &mut Vec<Row>) -> Result {
        let gib = self.gib.to_string();
        let (ours, theirs, plain) = (folder.join("ours"), folder.join("torch"), folder.join("raw"));
        let speed = |seconds: f64| format!("{:.2} GB/s", self.gib as f64 * 1.073_741_824 / seconds);
        let fresh = |path: &Path| {
            // Nothing is there before the first run.
            let _ = std::fs::remove_dir_all(path);
            let _ = std::fs::remove_file(path);
            Ok(())
        };
        let evict = |path: &Path| {
            if !cold {
                return Ok(());
            }
            output(self.script("evict").arg(path)).map(drop)
        };

        let limit = self.median(|| fresh(&plain), || self.rust("write", &plain, &[&gib]))?;
        let save = self.median(|| fresh(&ours), || self.rust("save", &ours, &[&gib]))?;
        let torch = self.median(|| fresh(&theirs), || self.torch("save", &theirs, &[&gib]))?;
        let what = |what: &str| format!("{what} {gib} GiB, {place}, one process");
        rows.push(Row {
            what: what("save"),
            ours: speed(save),
            torch: speed(torch),
            limit: speed(limit),
        });

        let limit = self.median(|| evict(&plain), || self.rust("read", &plain, &[&gib]))?;
        fresh(&plain)?;
        let load = self.median(|| evict(&ours), || self.rust("load", &ours, &[&gib]))?;
        fresh(&ours)?;
        let torch = self.median(|| evict(&theirs), || self.torch("load", &theirs, &[&gib]))?;
        rows.push(Row {
            what: what(if cold { "load, page cache dropped," } else { "load" }),
            ours: speed(load),
            torch: speed(torch),
            limit: speed(limit),
        });

        let threads =
            self.median(|| fresh(&theirs), || self.torch("save", &theirs, &[&gib, "2"]))?;
        rows.push(Row {
            what: what("save with PyTorch's `thread_count=2`,"),
            ours: "—".into(),
            torch: speed(threads),
            limit: "—".into(),
        });
        Ok(())
    }

    /// What one of 64 ranks reads for its part of a tensor that one rank saved.
    fn slices(&self, folder: &Path, rows: &mut Vec<Row>) -> Result {
        let saved = folder.join("one");
        self.torch("save-one", &saved, &[])?;
        for by in ["rows", "columns"] {
            let ratio = |report: &Value| {
                let number = |field| report.get(field).and_then(Value::as_f64).unwrap_or(f64::NAN);
                let (read, needed) = (number("bytes_read"), number("bytes_needed"));
                format!("{:.2} ({:.0} ms)", read / needed, number("seconds") * 1e3)
            };
            let ours = self.rust("slice", &saved, &[by])?;
            let torch = self.torch("slice", &saved, &[by])?;
            rows.push(Row {
                what: format!("bytes read per byte needed, 1/64 of 1 GiB by {by}"),
                ours: ratio(&ours),
                torch: ratio(&torch),
                limit: "1.00".into(),
            });
        }
        Ok(())
    }

    /// From the shell's point of view: the process starts, lists a small checkpoint, and ends.
    fn start_up(&self, command: &Path, rows: &mut Vec<Row>) -> Result {
        let fixture = workspace::root().join("fixtures/pytorch/fsdp2_adam_2r");
        let ours = wall(|| {
            let mut inspect = Command::new(command);
            inspect.arg("inspect").arg(&fixture);
            inspect
        })?;
        let torch = wall(|| {
            let mut inspect = self.script("inspect");
            inspect.arg(&fixture);
            inspect
        })?;
        let milliseconds = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        rows.push(Row {
            what: "list a small checkpoint: `dcp inspect`, or Python with torch".into(),
            ours: milliseconds(ours),
            torch: milliseconds(torch),
            limit: "—".into(),
        });
        Ok(())
    }

    fn median(
        &self,
        prepare: impl Fn() -> Result,
        measure: impl Fn() -> Result<Value>,
    ) -> Result<f64> {
        let mut seconds = Vec::new();
        for _ in 0..RUNS {
            prepare()?;
            let report = measure()?;
            seconds.push(report.get("seconds").and_then(Value::as_f64).ok_or("no seconds")?);
        }
        Ok(middle(seconds))
    }

    fn script(&self, what: &str) -> Command {
        let mut python = Command::new(&self.python);
        python.env("PYTHONDONTWRITEBYTECODE", "1");
        python.arg(workspace::root().join("xtask/python/bench.py")).arg(what);
        python
    }

    fn torch(&self, what: &str, path: &Path, args: &[&str]) -> Result<Value> {
        Ok(serde_json::from_str(&output(self.script(what).arg(path).args(args))?)?)
    }

    fn rust(&self, what: &str, path: &Path, args: &[&str]) -> Result<Value> {
        let report = output(Command::new(&self.rust).arg(what).arg(path).args(args))?;
        Ok(serde_json::from_str(&report)?)
    }
}

fn wall(command: impl Fn() -> Command) -> Result<f64> {
    let mut seconds = Vec::new();
    for _ in 0..STARTS {
        let mut command = command();
        let start = Instant::now();
        let status = command.stdout(Stdio::null()).status()?;
        seconds.push(start.elapsed().as_secs_f64());
        if !status.success() {
            return Err(format!("{status}: {command:?}").into());
        }
    }
    Ok(middle(seconds))
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn command_line_tool() -> Result<PathBuf> {
    process::run(process::cargo().args(["build", "--quiet", "--release", "-p", "dcp-cli"]))?;
    Ok(workspace::target()?.join("release").join("dcp"))
}

/// Cores, memory and kernel, without naming the machine.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let first = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let memory = first("/proc/meminfo")
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().split(' ').next()?.parse().ok())
        .unwrap_or(0_u64)
        >> 20;
    let kernel = first("/proc/sys/kernel/osrelease");
    let kernel = kernel.split('-').next().unwrap_or_default().trim().to_owned();
    let commit = workspace::commit();
    format!("{cores} cores, {memory} GiB of memory, Linux {kernel}; commit {commit}.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_the_median() {
        assert!((middle(vec![3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!(middle(Vec::new()).is_nan());
    }
}
