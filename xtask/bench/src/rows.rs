//! The rows of `cargo xtask bench --check --ratios`: ours and its limit in turns, without PyTorch.
//!
//! The Rust half is `dcp/examples/bench.rs`, with smaller states than those of `cargo xtask bench`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use crate::machine::build;
use xtask_host::process::{Scratch, output, succeeds};
use xtask_host::{Result, workspace};

/// Rounds of every row. Those that seem to be worse than committed, and new ones, take
/// [`ROUNDS_MAX`].
const ROUNDS: u32 = 3;
const ROUNDS_MAX: u32 = 9;
/// Starts of a process that takes milliseconds, of which the fastest counts.
const STARTS: u32 = 9;
/// The saved state.
const GIB: &str = "0.5";
/// Free space that a place needs, in MiB: three states, and one tensor of 1 GiB.
const SPACE_MIB: u64 = 3072;
/// Memory besides that of tmpfs, in MiB: 8 replicas of the state, or two states.
const MEMORY_MIB: u64 = 5120;
const REPLICAS: &str = "8";
const WRITERS: [u32; 3] = [2, 4, 8];
const CONVERTED: [(&str, &str); 2] =
    [("safetensors", "made.safetensors"), ("torch-save", "made.pt")];

/// Where the rows write.
pub(crate) struct Folders {
    /// In memory.
    pub(crate) tmpfs: PathBuf,
    /// On a disk.
    pub(crate) disk: PathBuf,
}

/// The outcome of one row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Found {
    /// The speed of ours as a part of the speed of the limit.
    Ratio(f64),
    /// Why it cannot be measured here.
    Skipped(String),
}

/// Measures every row. One for whose name and ratio `is_enough` after a few rounds takes no more.
pub(crate) fn measure(
    folders: &Folders,
    is_enough: &dyn Fn(&str, f64) -> bool,
) -> Result<Vec<(String, Found)>> {
    let (program, command) = build()?;
    let mut rows = Rows { program, command, is_enough, found: Vec::new() };
    let tmpfs = Place::new("tmpfs", &folders.tmpfs);
    rows.speeds(&tmpfs, &tmpfs.cannot)?;
    rows.replicas(&tmpfs)?;
    rows.stalls(&tmpfs)?;
    rows.slices(&tmpfs)?;
    drop(tmpfs);
    let disk = Place::new("disk", &folders.disk);
    let cannot_evict = disk.cannot.clone().or_else(|| disk.cannot_evict());
    rows.speeds(&disk, &cannot_evict)?;
    rows.writers(&disk)?;
    rows.start_up()?;
    Ok(rows.found)
}

/// A folder to write to, or the reason why its rows are skipped.
struct Place {
    name: &'static str,
    scratch: Option<Scratch>,
    cannot: Option<String>,
}

impl Place {
    fn new(name: &'static str, folder: &Path) -> Self {
        let skipped = |cannot: String| Self { name, scratch: None, cannot: Some(cannot) };
        let free = match free_mib(folder) {
            Ok(free) => free,
            Err(error) => return skipped(error.to_string()),
        };
        if free < SPACE_MIB {
            return skipped(format!("{SPACE_MIB} MiB of {name} are needed, {free} are free"));
        }
        let needed = MEMORY_MIB + if name == "tmpfs" { SPACE_MIB } else { 0 };
        match available_memory_mib() {
            Some(available) if available < needed => {
                return skipped(format!(
                    "{needed} MiB of memory are needed, {available} are available"
                ));
            }
            _ => {}
        }
        match Scratch::new(folder, "dcp-bench-ratios", false) {
            Ok(scratch) => Self { name, scratch: Some(scratch), cannot: None },
            Err(error) => skipped(error.to_string()),
        }
    }

    /// A path in the folder. The rows of a place without one are skipped before they use it.
    fn path(&self, name: &str) -> PathBuf {
        self.scratch.as_ref().map_or_else(PathBuf::new, |scratch| scratch.path().join(name))
    }

    /// The path after what an earlier round wrote there is removed.
    fn fresh(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        // Nothing is there before the first round.
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
        path
    }

    fn is_disk(&self) -> bool {
        self.name == "disk"
    }

    fn cannot_evict(&self) -> Option<String> {
        let probe = self.path("probe");
        let evicted = fs::write(&probe, "probe").map_err(Into::into).and_then(|()| evict(&probe));
        evicted.err().map(|error| format!("the page cache cannot be dropped: {error}"))
    }
}

type Measurement<'a> = &'a dyn Fn() -> Result<f64>;

struct Rows<'a> {
    program: PathBuf,
    command: PathBuf,
    is_enough: &'a dyn Fn(&str, f64) -> bool,
    found: Vec<(String, Found)>,
}

impl Rows<'_> {
    /// One row: seconds of the limit and of ours in turns, the fastest of each.
    fn row(
        &mut self,
        cannot: &Option<String>,
        name: String,
        limit: Measurement<'_>,
        ours: Measurement<'_>,
    ) -> Result {
        if let Some(reason) = cannot {
            self.found.push((name, Found::Skipped(reason.clone())));
            return Ok(());
        }
        let (mut fastest_limit, mut fastest) = (f64::INFINITY, f64::INFINITY);
        for round in 1..=ROUNDS_MAX {
            fastest_limit = fastest_limit.min(limit()?);
            fastest = fastest.min(ours()?);
            if round >= ROUNDS && (self.is_enough)(&name, fastest_limit / fastest) {
                break;
            }
        }
        println!("{name}: {fastest:.4} s, the limit {fastest_limit:.4} s");
        self.found.push((name, Found::Ratio(fastest_limit / fastest)));
        Ok(())
    }

    /// One row of bytes that are needed by bytes that are read, which no clock disturbs.
    fn bytes(
        &mut self,
        cannot: &Option<String>,
        name: String,
        report: &dyn Fn() -> Result<(f64, f64)>,
    ) -> Result {
        let found = match cannot {
            Some(reason) => Found::Skipped(reason.clone()),
            None => {
                let (needed, read) = report()?;
                println!("{name}: {read} bytes, of which {needed} are needed");
                Found::Ratio(needed / read)
            }
        };
        self.found.push((name, found));
        Ok(())
    }

    /// Saves, loads and conversions of one process.
    fn speeds(&mut self, place: &Place, cannot_load: &Option<String>) -> Result {
        let (program, command) = (self.program.clone(), self.command.clone());
        let run = |what: &str, path: &Path| seconds(&program, what, path, &[GIB]);
        let (cannot, on) = (&place.cannot, place.name);
        self.row(
            cannot,
            format!("save {GIB} GiB, {on}"),
            &|| run("write", &place.fresh("plain")),
            &|| run("save", &place.fresh("ours")),
        )?;
        self.row(
            cannot,
            format!("save {GIB} GiB, by a save without the sidecar, {on}"),
            &|| run("save-without-sidecar", &place.fresh("ours")),
            &|| run("save", &place.fresh("ours")),
        )?;
        let ready = |name: &str| {
            let path = place.path(name);
            if place.is_disk() { evict(&path).map(|()| path) } else { Ok(path) }
        };
        let cold = if place.is_disk() { " with the page cache dropped" } else { "" };
        self.row(
            cannot_load,
            format!("load {GIB} GiB{cold}, {on}"),
            &|| run("read", &ready("plain")?),
            &|| run("load", &ready("ours")?),
        )?;
        for (format, name) in CONVERTED {
            self.row(
                cannot,
                format!("convert {GIB} GiB to {format}, by `cp`, {on}"),
                &|| wall(&mut copy(&place.path("ours"), &place.fresh("copy"))),
                &|| {
                    let mut convert = Command::new(&command);
                    convert.args(["-q", "convert"]).arg(place.path("ours")).arg(place.fresh(name));
                    wall(convert.args(["--to", format]))
                },
            )?;
        }
        Ok(())
    }

    /// Loads of the same tensors by the threads of one process, which [`Rows::speeds`] saved.
    fn replicas(&mut self, place: &Place) -> Result {
        let program = self.program.clone();
        let load = |way: &str, group: &str| {
            report(&program, "load-replicas", &place.path("ours"), &[REPLICAS, way, group])
        };
        let time = |way: &str, group: &str| number(&load(way, group)?, "seconds");
        let cannot = &place.cannot;
        for (way, group) in [("shared", "memory"), ("auto", "memory"), ("auto", "tcp")] {
            self.row(
                cannot,
                format!("{REPLICAS} replicas load {GIB} GiB, {way} by each alone, over {group}"),
                &|| time("alone", group),
                &|| time(way, group),
            )?;
        }
        self.bytes(cannot, format!("bytes that {REPLICAS} replicas share"), &|| {
            let report = load("shared", "memory")?;
            let needed = number(&report, "bytes_needed")? / REPLICAS.parse::<f64>()?;
            Ok((needed, number(&report, "bytes_read")?))
        })
    }

    /// The time for which the second asynchronous save stops training.
    fn stalls(&mut self, place: &Place) -> Result {
        let program = self.program.clone();
        self.row(
            &place.cannot,
            format!("training stops for an asynchronous save of {GIB} GiB, by a copy of memory"),
            &|| seconds(&program, "copy", Path::new("-"), &[GIB]),
            &|| seconds(&program, "stall", &place.fresh("stalls"), &[GIB]),
        )
    }

    /// What one of 64 ranks reads for its part of a tensor that one rank saved.
    fn slices(&mut self, place: &Place) -> Result {
        let program = self.program.clone();
        let one = place.fresh("one");
        if place.cannot.is_none() {
            report(&program, "save-one", &one, &[])?;
        }
        for by in ["rows", "columns"] {
            let file = one.join("__0_0.distcp");
            self.row(
                &place.cannot,
                format!("load 1/64 of 1 GiB by {by}"),
                &|| seconds(&program, "slice-plain", &file, &[by]),
                &|| seconds(&program, "slice", &one, &[by]),
            )?;
            self.bytes(&place.cannot, format!("bytes of 1/64 of 1 GiB by {by}"), &|| {
                let report = report(&program, "slice", &one, &[by])?;
                Ok((number(&report, "bytes_needed")?, number(&report, "bytes_read")?))
            })?;
        }
        Ok(())
    }

    /// Saves of several ranks, threads of one process, on one disk.
    fn writers(&mut self, place: &Place) -> Result {
        let program = self.program.clone();
        for ranks in WRITERS {
            let ranks = ranks.to_string();
            self.row(
                &place.cannot,
                format!("save {GIB} GiB, {ranks} ranks, {}", place.name),
                &|| seconds(&program, "write-files", &place.fresh("plain"), &[GIB, &ranks]),
                &|| seconds(&program, "save-ranks", &place.fresh("ours"), &[GIB, &ranks]),
            )?;
        }
        Ok(())
    }

    /// From the start of `dcp inspect` to its end, by a process that does nothing.
    fn start_up(&mut self) -> Result {
        let command = self.command.clone();
        let fixture = workspace::root().join("fixtures/pytorch/fsdp2_adam_2r");
        let fastest = |start: &dyn Fn() -> Command| {
            let walls = (0..STARTS).map(|_| wall(&mut start())).collect::<Result<Vec<_>>>()?;
            Ok(walls.into_iter().fold(f64::INFINITY, f64::min))
        };
        self.row(
            &None,
            "list a small checkpoint with `dcp inspect`, by a start of `true`".into(),
            &|| fastest(&|| Command::new("true")),
            &|| {
                fastest(&|| {
                    let mut inspect = Command::new(&command);
                    inspect.arg("inspect").arg(&fixture);
                    inspect
                })
            },
        )
    }
}

fn report(program: &Path, what: &str, path: &Path, args: &[&str]) -> Result<Value> {
    let report = output(Command::new(program).arg(what).arg(path).args(args))?;
    Ok(serde_json::from_str(&report)?)
}

fn seconds(program: &Path, what: &str, path: &Path, args: &[&str]) -> Result<f64> {
    number(&report(program, what, path, args)?, "seconds")
}

fn number(report: &Value, field: &str) -> Result<f64> {
    let number = report.get(field).and_then(Value::as_f64);
    number.ok_or_else(|| format!("a measurement has no {field}").into())
}

fn wall(command: &mut Command) -> Result<f64> {
    let start = Instant::now();
    let status = command.stdout(Stdio::null()).status()?;
    let seconds = start.elapsed().as_secs_f64();
    if status.success() { Ok(seconds) } else { Err(format!("{status}: {command:?}").into()) }
}

/// A copy that is on the disk when the command ends, as a converted checkpoint is.
fn copy(source: &Path, target: &Path) -> Command {
    let mut copy = Command::new("sh");
    copy.args(["-c", "cp -r \"$1\" \"$0\" && sync \"$0\"/*"]).args([target, source]);
    copy
}

/// Drops a file, or the files of a folder, from the page cache.
fn evict(path: &Path) -> Result {
    let files = if path.is_dir() {
        fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?
    } else {
        vec![path.to_owned()]
    };
    for file in files {
        let mut dd = Command::new("dd");
        dd.arg(format!("if={}", file.display())).args(["iflag=nocache", "count=0"]);
        if !succeeds(&mut dd) {
            return Err(format!("dd iflag=nocache failed on {}", file.display()).into());
        }
    }
    Ok(())
}

/// Free space of the file system of a folder.
pub(crate) fn free_mib(folder: &Path) -> Result<u64> {
    if !folder.is_dir() {
        return Err(format!("{} is not a folder", folder.display()).into());
    }
    let shown = output(Command::new("df").arg("-Pk").arg(folder))?;
    let kib = shown.lines().nth(1).and_then(|line| line.split_whitespace().nth(3)?.parse().ok());
    kib.map(|kib: u64| kib >> 10).ok_or_else(|| "df printed no free space".into())
}

/// Memory that programs can have without others losing theirs; `None` where Linux does not say.
fn available_memory_mib() -> Option<u64> {
    let lines = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = lines.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(kib.trim().split(' ').next()?.parse::<u64>().ok()? >> 10)
}
