//! Speeds, ours beside PyTorch's, from one run on one machine.
//!
//! The Rust half is `dcp/examples/bench.rs`, PyTorch's is `xtask/bench/python/bench.py`. Every
//! measurement is a process of its own that prints seconds; the fastest of five counts, as the one
//! that other work on the machine disturbed least. Files on disk are dropped from the page cache
//! before they are read.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for a command-line tool")]

mod convert;
mod cuda;
mod jobs;
mod machine;
mod object;
mod plan;
mod python;
mod ratios;
mod rows;

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use crate::machine::{Machine, build, machine};
use xtask_host::process::{Scratch, output};
use xtask_host::{Result, venv, workspace};

const ROUNDS: usize = 5;
const STARTS: usize = 9;
/// Ranks that load together.
const REPLICAS: &str = "8";
/// Ranks that save to one disk.
const WRITERS: [u32; 3] = [2, 4, 8];

/// Parts of the table, by the names under which they are measured alone.
const PARTS: [&str; 6] = ["tmpfs", "disk", "writers", "stalls", "slices", "start"];

/// Prints the table, or the named parts of it; with `convert`, the one of conversions, with `object`,
/// that of object stores, and with `cuda`, that of copies from and to a device.
pub fn main(args: &[&str]) -> Result {
    let (convert, args) = match args {
        ["cuda", rest @ ..] => return cuda::main(rest),
        ["object", rest @ ..] => return object::main(rest),
        ["jobs", rest @ ..] => return jobs::main(rest),
        ["plan", rest @ ..] => return plan::main(rest),
        ["python", rest @ ..] => return python::main(rest),
        ["--check", "--ratios", rest @ ..] => return ratios::check(rest),
        ["--check", rest @ ..] => return plan::check(rest),
        ["convert", rest @ ..] => (true, rest),
        _ => (false, args),
    };
    let mut gib = 2_u64;
    let mut disk = workspace::target()?;
    let mut tmpfs = PathBuf::from("/dev/shm");
    let mut parts = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if PARTS.contains(arg) && !convert {
            parts.push(*arg);
            continue;
        }
        let value = args.next().ok_or_else(|| format!("{arg} needs a value"))?;
        match *arg {
            "--gib" => gib = value.parse()?,
            "--disk" => disk = PathBuf::from(value),
            "--tmpfs" => tmpfs = PathBuf::from(value),
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let python = venv::python(venv::NEWEST)?;
    let (rust, command) = build()?;
    if convert {
        return convert::main(&Machine { python, command, tmpfs, disk });
    }
    let bench = Bench { python, rust, gib };
    let machine = machine();

    println!("\n{machine}\n");
    println!("| what | ours | PyTorch {} | plain system calls |", venv::NEWEST);
    println!("|---|---:|---:|---:|");
    let mut rows = Vec::new();
    // A measurement that fails leaves the rows before it.
    let print = |rows: &mut Vec<Row>| {
        for row in rows.drain(..) {
            println!("| {} | {} | {} | {} |", row.what, row.ours, row.torch, row.limit);
        }
    };
    for part in PARTS {
        if !parts.is_empty() && !parts.contains(&part) {
            continue;
        }
        let folder = if matches!(part, "disk" | "writers") { &disk } else { &tmpfs };
        let scratch = Scratch::new(folder, "dcp-bench", false)?;
        let folder = scratch.path();
        match part {
            "tmpfs" => bench.speeds("tmpfs", folder, false, &mut rows)?,
            "disk" => bench.speeds("disk", folder, true, &mut rows)?,
            "writers" => {
                for ranks in WRITERS {
                    bench.writers(folder, ranks, &mut rows)?;
                }
            }
            "stalls" => bench.stalls(folder, &mut rows)?,
            "slices" => bench.slices(folder, &mut rows)?,
            _ => bench.start_up(&command, &mut rows)?,
        }
        print(&mut rows);
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

        let direct = |what: &str, path: &Path| match cold {
            true => self.rust(what, path, &[&gib]),
            // Memory has nothing to go past.
            false => Ok(json!({ "seconds": f64::MAX })),
        };
        let limits = |plain: f64, direct: f64| match cold {
            true => format!("{}; `O_DIRECT` {}", speed(plain), speed(direct)),
            false => speed(plain),
        };
        let [limit_direct, limit, save, plain_save, torch, threads] = rounds([
            &|| fresh(&plain).and_then(|()| direct("write-direct", &plain)),
            &|| fresh(&plain).and_then(|()| self.rust("write", &plain, &[&gib])),
            &|| fresh(&ours).and_then(|()| self.rust("save", &ours, &[&gib])),
            &|| fresh(&ours).and_then(|()| self.rust("save-without-sidecar", &ours, &[&gib])),
            &|| fresh(&theirs).and_then(|()| self.torch("save", &theirs, &[&gib])),
            &|| fresh(&theirs).and_then(|()| self.torch("save", &theirs, &[&gib, "2"])),
        ])?;
        let what = |what: &str| format!("{what} {gib} GiB, {place}, one process");
        rows.push(Row {
            what: what("save"),
            ours: speed(save),
            torch: format!("{}; with `thread_count=2` {}", speed(torch), speed(threads)),
            limit: limits(limit, limit_direct),
        });
        rows.push(Row {
            what: what("save without the sidecar, and its share of a save,"),
            ours: format!("{}; {:.1} %", speed(plain_save), (save / plain_save - 1.0) * 100.0),
            torch: String::new(),
            limit: String::new(),
        });

        let [limit, limit_direct, load, torch] = rounds([
            &|| evict(&plain).and_then(|()| self.rust("read", &plain, &[&gib])),
            &|| evict(&plain).and_then(|()| direct("read-direct", &plain)),
            &|| evict(&ours).and_then(|()| self.rust("load", &ours, &[&gib])),
            &|| evict(&theirs).and_then(|()| self.torch("load", &theirs, &[&gib])),
        ])?;
        rows.push(Row {
            what: what(if cold { "load with the page cache dropped," } else { "load" }),
            ours: speed(load),
            torch: speed(torch),
            limit: limits(limit, limit_direct),
        });
        for group in ["memory", "tcp"] {
            for what in ["replicas", "shards"] {
                self.ranks(what, (place, cold), (&ours, group), &evict, rows)?;
            }
        }
        Ok(())
    }

    /// Loads of the same tensors, or of other rows of them, by the threads of one process, in the ways
    /// that there are.
    fn ranks(
        &self,
        loaded: &str,
        (place, cold): (&str, bool),
        (saved, group): (&Path, &str),
        evict: &dyn Fn(&Path) -> Result,
        rows: &mut Vec<Row>,
    ) -> Result {
        let read = Cell::new([f64::NAN; 3]);
        let load = |at: usize, way: &str| {
            evict(saved)?;
            let report = self.rust(&format!("load-{loaded}"), saved, &[REPLICAS, way, group])?;
            let number = |field| report.get(field).and_then(Value::as_f64).unwrap_or(f64::NAN);
            let of_rank = number("bytes_needed") / REPLICAS.parse::<f64>()?;
            let mut ratios = read.get();
            ratios[at] = number("bytes_read") / of_rank;
            read.set(ratios);
            Ok(report)
        };
        let [alone, shared, chosen] =
            rounds([&|| load(0, "alone"), &|| load(1, "shared"), &|| load(2, "auto")])?;
        let [read_alone, read_shared, read_chosen] = read.get();
        let of_each = if loaded == "shards" { 512 / REPLICAS.parse::<u32>()? } else { 512 };
        let cold = if cold { " with the page cache dropped," } else { "" };
        let row = |seconds: f64, ratio: f64| format!("{seconds:.2} s, reads {ratio:.2} ×");
        rows.push(Row {
            what: format!(
                "{REPLICAS} {loaded} load {of_each} MiB,{cold} {place}, group over {group}"
            ),
            ours: format!(
                "each {}; shared {}; `Auto` {}",
                row(alone, read_alone),
                row(shared, read_shared),
                row(chosen, read_chosen)
            ),
            torch: String::new(),
            limit: String::new(),
        });
        Ok(())
    }

    /// Saves of several ranks on one disk: ours are threads of one process, PyTorch's processes.
    fn writers(&self, folder: &Path, ranks: u32, rows: &mut Vec<Row>) -> Result {
        let (gib, ranks) = (self.gib.to_string(), ranks.to_string());
        let fresh = |name: &str| {
            let path = folder.join(name);
            // Nothing is there before the first run.
            let _ = std::fs::remove_dir_all(&path);
            path
        };
        let [limit, ours, torch] = rounds([
            &|| self.rust("write-files", &fresh("raw"), &[&gib, &ranks]),
            &|| self.rust("save-ranks", &fresh("ours"), &[&gib, &ranks]),
            &|| self.torch("save-ranks", &fresh("torch"), &[&gib, &ranks]),
        ])?;
        let speed = |seconds: f64| format!("{:.2} GB/s", self.gib as f64 * 1.073_741_824 / seconds);
        rows.push(Row {
            what: format!("save {gib} GiB, disk, {ranks} ranks"),
            ours: speed(ours),
            torch: speed(torch),
            limit: speed(limit),
        });
        Ok(())
    }

    /// The time for which an asynchronous save stops training.
    fn stalls(&self, folder: &Path, rows: &mut Vec<Row>) -> Result {
        let gib = self.gib.to_string();
        let fresh = |name: &str| {
            let path = folder.join(name);
            // Nothing is there before the first run.
            let _ = std::fs::remove_dir_all(&path);
            path
        };
        let [limit, of_tensors, copied, shared, torch] = rounds([
            &|| self.rust("copy", Path::new("-"), &[&gib]),
            &|| self.rust("copy-tensors", Path::new("-"), &[&gib]),
            &|| self.rust("stall", &fresh("ours"), &[&gib]),
            &|| self.rust("stall-immutable", &fresh("ours"), &[&gib]),
            &|| self.torch("stall", &fresh("torch"), &[&gib]),
        ])?;
        let shown = |seconds: f64| format!("{:.1} ms", seconds * 1000.0);
        let what = |tensors: &str| {
            format!("training stops for an asynchronous save of {gib} GiB{tensors}")
        };
        rows.push(Row {
            what: what(", the second"),
            ours: shown(copied),
            torch: shown(torch),
            limit: format!(
                "copy on all cores: {} of the tensors, {} in one piece for each core",
                shown(of_tensors),
                shown(limit)
            ),
        });
        rows.push(Row {
            what: what(" in immutable memory"),
            ours: shown(shared),
            torch: shown(torch),
            limit: "—".into(),
        });
        Ok(())
    }

    /// What one of 64 ranks reads for its part of a tensor that one rank saved.
    fn slices(&self, folder: &Path, rows: &mut Vec<Row>) -> Result {
        let saved = folder.join("one");
        self.torch("save-one", &saved, &[])?;
        let file = saved.join("__0_0.distcp");
        for by in ["rows", "columns"] {
            let [ours, torch, plain] = fastest([
                &|| self.rust("slice", &saved, &[by]),
                &|| self.torch("slice", &saved, &[by]),
                &|| self.rust("slice-plain", &file, &[by]),
            ])?;
            let number = |report: &Value, field| {
                report.get(field).and_then(Value::as_f64).unwrap_or(f64::NAN)
            };
            let shown = |report: &Value| {
                let ratio = number(report, "bytes_read") / number(report, "bytes_needed");
                format!("{ratio:.2} ({:.0} ms)", number(report, "seconds") * 1e3)
            };
            rows.push(Row {
                what: format!("bytes read per byte needed, 1/64 of 1 GiB by {by}"),
                ours: shown(&ours),
                torch: shown(&torch),
                limit: format!("1.00 ({:.0} ms)", number(&plain, "seconds") * 1e3),
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

    fn script(&self, what: &str) -> Command {
        let mut python = Command::new(&self.python);
        python.env("PYTHONDONTWRITEBYTECODE", "1");
        python.arg(workspace::root().join("xtask/bench/python/bench.py")).arg(what);
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

type Measurement<'a> = &'a dyn Fn() -> Result<Value>;

/// The fewest seconds of each.
fn rounds<const N: usize>(measurements: [Measurement<'_>; N]) -> Result<[f64; N]> {
    let reports = fastest(measurements)?;
    Ok(reports.map(|report| report.get("seconds").and_then(Value::as_f64).unwrap_or(f64::NAN)))
}

/// The fastest report of each. All take turns, so that what else the machine does meets all.
fn fastest<const N: usize>(measurements: [Measurement<'_>; N]) -> Result<[Value; N]> {
    let mut fastest = [const { (f64::INFINITY, Value::Null) }; N];
    for _ in 0..ROUNDS {
        for ((fewest, fastest), measure) in fastest.iter_mut().zip(measurements) {
            let report = measure()?;
            let seconds = report.get("seconds").and_then(Value::as_f64).ok_or("no seconds")?;
            if seconds < *fewest {
                (*fewest, *fastest) = (seconds, report);
            }
        }
    }
    Ok(fastest.map(|(_, report)| report))
}

fn wall(command: impl Fn() -> Command) -> Result<f64> {
    let mut fastest = f64::INFINITY;
    for _ in 0..STARTS {
        let mut command = command();
        let start = Instant::now();
        let status = command.stdout(Stdio::null()).status()?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
        if !status.success() {
            return Err(format!("{status}: {command:?}").into());
        }
    }
    Ok(fastest)
}
