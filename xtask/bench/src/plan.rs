//! Planning and the index of large saves: seconds, memory and instructions, without PyTorch.
//!
//! The Rust half is `dcp-engine/examples/bench_planning.rs`. Instructions are counted by callgrind,
//! below the function `measured` of that program: they hardly depend on what else the machine does.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Map, Value, json};

use crate::machine::machine;
use xtask_host::process::{Scratch, output, succeeds};
use xtask_host::{Result, process, workspace};

/// How tensors are spread over the ranks, by the names of the example.
const LAYOUTS: [&str; 6] = ["rows", "grid", "replicas", "replicated", "mixed", "irregular"];
/// Ranks and tensors of the save that is the target's.
const TARGET: (u32, u32) = (1024, 500);
/// Ranks of the saves of [`KEYS`] tensors, by which the cost of an item and of the coordinator is plotted.
const RANKS: [u32; 4] = [256, 1024, 4096, 16384];
const KEYS: u32 = 1000;
/// Layouts and ranks of first saves whose messages are measured.
const SENT_LAYOUTS: [&str; 5] = ["replicated", "replicas", "grid", "mixed", "irregular"];
const SENT_RANKS: [u32; 3] = [1024, 4096, 16384];
/// The rows of the tensors that are saved: with more ranks some have none.
const ROWS_MAX: u32 = 8192;
/// Ranks and tensors of the saves whose index is measured.
const INDEX_SIZES: [(u32, u32); 2] = [(1024, 500), (4096, 1000)];
/// What is measured of an index.
const OF_INDEX: [&str; 3] = ["decode", "decode-one", "encode"];
const ROUNDS: usize = 3;

/// The committed counts.
const TABLE: &str = "xtask/bench/counts.json";
/// The most that a count may exceed the committed one, in percent.
const LOSS_MAX: u64 = 20;
/// Layouts of the counted saves.
const COUNTED_LAYOUTS: [&str; 4] = ["rows", "grid", "replicas", "replicated"];
/// Ranks and tensors of the counted saves: as many items, on few ranks and on many.
const COUNTED: [(u32, u32); 2] = [(256, 100), (1024, 25)];

/// Prints seconds and peak memory of large saves, as a table and as a line of JSON; with `bytes` the
/// bytes of their plans, which are exact on any machine.
pub(crate) fn main(args: &[&str]) -> Result {
    let program = build()?;
    match args {
        [] => {}
        ["bytes"] => return print_bytes(&program),
        [unknown, ..] => return Err(format!("unknown argument {unknown}").into()),
    }
    println!("\n{}\n", machine());
    println!(
        "| what | seconds | peak memory | ns for each item | bytes of the messages or the file |"
    );
    println!("|---|---:|---:|---:|---:|");
    let scratch = Scratch::new(&workspace::target()?, "dcp-bench-plan", false)?;
    let file = scratch.path().join("file");
    let mut rows = Vec::new();
    let plotted = LAYOUTS.iter().flat_map(|layout| RANKS.map(|ranks| (*layout, (ranks, KEYS))));
    let mut costs = Vec::new();
    for (layout, size) in LAYOUTS.map(|layout| (layout, TARGET)).into_iter().chain(plotted) {
        let (ranks, keys) = size;
        if layout == "rows" && ranks > ROWS_MAX {
            continue;
        }
        let bytes = make(&program, "make-plans", layout, size, &file)?;
        let name = format!("plan {layout} {ranks} x {keys}");
        let mut row = fastest(&program, "plan", &file, &name, bytes)?;
        // As many as ranks send.
        row.items = u64::from(ranks) * u64::from(keys);
        println!("{row}");
        if size != TARGET {
            costs.push((layout, ranks, row.seconds));
        }
        rows.push(row);
    }
    for (ranks, keys) in INDEX_SIZES {
        let bytes = make(&program, "make-metadata", "grid", (ranks, keys), &file)?;
        for what in OF_INDEX {
            let name = format!("{what} grid {ranks} x {keys}");
            let row = fastest(&program, what, &file, &name, bytes)?;
            println!("{row}");
            rows.push(row);
        }
    }
    print_costs(&costs);
    let json = rows.iter().map(|row| {
        json!({
            "what": row.name, "seconds": row.seconds, "peak_kib": row.peak_kib,
            "items": row.items, "bytes": row.bytes,
        })
    });
    println!("\n{}", Value::Array(json.collect()));
    Ok(())
}

/// Plots what an item costs the coordinator, and its seconds, by layout and ranks.
fn print_costs(costs: &[(&str, u32, f64)]) {
    println!("\nns for each item, one # for each 10; seconds of the coordinator, {KEYS} tensors\n");
    let mut before = "";
    for &(layout, ranks, seconds) in costs {
        let each = seconds * 1e9 / (f64::from(ranks) * f64::from(KEYS));
        let shown = if layout == before { "" } else { layout };
        let bar = "#".repeat((each / 10.0).round() as usize);
        println!("    {shown:<11} {ranks:>6}  {bar:<36} {each:>4.0} ns {seconds:>6.2} s");
        before = layout;
    }
}

/// Prints the bytes of plans that the coordinator of a first save receives and sends, as a table.
fn print_bytes(program: &Path) -> Result {
    println!(
        "| plans of {KEYS} tensors | ranks | whole | received | most of a rank but 0 | request | places |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|");
    for layout in SENT_LAYOUTS {
        for ranks in SENT_RANKS {
            let (ranks_arg, keys) = (ranks.to_string(), KEYS.to_string());
            let found = output(Command::new(program).args(["bytes", layout, &ranks_arg, &keys]))?;
            let found: Value = serde_json::from_str(&found)?;
            let columns = ["whole", "received", "most", "request", "places"].map(|name| {
                found.get(name).and_then(Value::as_u64).map_or("?".into(), |n| n.to_string())
            });
            println!("| {layout} | {ranks} | {} |", columns.join(" | "));
        }
    }
    Ok(())
}

struct Row {
    name: String,
    seconds: f64,
    items: u64,
    peak_kib: u64,
    bytes: u64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, seconds, items, peak_kib, bytes } = self;
        let (each, peak) = (seconds * 1e9 / *items as f64, peak_kib >> 10);
        write!(f, "| {name} | {seconds:.3} | {peak} MiB | {each:.0} | {bytes} |")
    }
}

fn fastest(program: &Path, what: &str, file: &Path, name: &str, bytes: u64) -> Result<Row> {
    let mut row =
        Row { name: name.to_owned(), seconds: f64::INFINITY, items: 1, peak_kib: 0, bytes };
    for _ in 0..ROUNDS {
        let report = output(Command::new(program).arg(what).arg(file))?;
        let report: Value = serde_json::from_str(&report)?;
        let number = |field| report.get(field).and_then(Value::as_u64).ok_or("a field is missing");
        let seconds = report.get("seconds").and_then(Value::as_f64).ok_or("no seconds")?;
        row.seconds = row.seconds.min(seconds);
        (row.items, row.peak_kib) = (number("items")?, row.peak_kib.max(number("peak_kib")?));
    }
    Ok(row)
}

/// Makes the input of a measurement and returns its length.
fn make(
    program: &Path,
    what: &str,
    layout: &str,
    (ranks, keys): (u32, u32),
    file: &Path,
) -> Result<u64> {
    let (ranks, keys) = (ranks.to_string(), keys.to_string());
    output(Command::new(program).args([what, layout, &ranks, &keys]).arg(file))?;
    Ok(std::fs::metadata(file)?.len())
}

/// Compares instructions and bytes with the committed table; `--update` writes it.
pub(crate) fn check(args: &[&str]) -> Result {
    let update = match args {
        [] => false,
        ["--update"] => true,
        _ => return Err(format!("unknown arguments {}", args.join(" ")).into()),
    };
    if !succeeds(Command::new("valgrind").arg("--version")) {
        println!("SKIPPED: valgrind, which counts instructions, is not here");
        return Ok(());
    }
    let program = build()?;
    let scratch = Scratch::new(&workspace::target()?, "dcp-bench-check", false)?;
    let found = counts(&program, scratch.path())?;
    let path = workspace::root().join(TABLE);
    if update {
        std::fs::write(&path, format!("{:#}\n", Value::Object(found)))?;
        println!("{TABLE} is written");
        return Ok(());
    }
    let committed: Map<String, Value> = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
    let worse = compare(&committed, &found);
    if worse.is_empty() {
        println!("no count is more than {LOSS_MAX} % over {TABLE}");
        return Ok(());
    }
    let advice = "find the cause, or write the table again with --update and say why";
    Err(format!("counts are over {TABLE}: {}; {advice}", worse.join("; ")).into())
}

fn counts(program: &Path, folder: &Path) -> Result<Map<String, Value>> {
    let mut found = Map::new();
    let file = folder.join("file");
    for (ranks, keys) in COUNTED {
        let items = u64::from(ranks) * u64::from(keys);
        for layout in COUNTED_LAYOUTS {
            let name = format!("plan {layout} {ranks} x {keys}");
            let bytes = make(program, "make-plans", layout, (ranks, keys), &file)?;
            found.insert(format!("{name}, bytes of a message"), (bytes / u64::from(ranks)).into());
            let count = instructions(program, "plan", &file, folder)?;
            found.insert(format!("{name}, instructions for each item"), (count / items).into());
        }
        let bytes = make(program, "make-metadata", "grid", (ranks, keys), &file)?;
        let name = format!("index of {ranks} x {keys}");
        found.insert(format!("{name}, bytes for each chunk"), (bytes / items).into());
        for what in OF_INDEX {
            let count = instructions(program, what, &file, folder)?;
            found.insert(
                format!("{name}, {what}, instructions for each chunk"),
                (count / items).into(),
            );
        }
    }
    Ok(found)
}

/// Instructions of the measured part of a run.
fn instructions(program: &Path, what: &str, file: &Path, folder: &Path) -> Result<u64> {
    let report = folder.join("callgrind");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--tool=callgrind", "--collect-atstart=no"]);
    valgrind.arg("--toggle-collect=*bench_planning*measured*");
    valgrind.arg(format!("--callgrind-out-file={}", report.display()));
    let status = valgrind.arg(program).arg(what).arg(file).stdout(Stdio::null()).status()?;
    if !status.success() {
        return Err(format!("{status}: {valgrind:?}").into());
    }
    let report = std::fs::read_to_string(report)?;
    let total = report.lines().find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok());
    total.filter(|total| *total > 0).ok_or_else(|| "callgrind counted nothing".into())
}

/// What of `found` is too much, and rows that only one of the two has. Prints every row.
fn compare(committed: &Map<String, Value>, found: &Map<String, Value>) -> Vec<String> {
    let mut worse = Vec::new();
    for (name, count) in found {
        let count = count.as_u64().unwrap_or(u64::MAX);
        let Some(before) = committed.get(name).and_then(Value::as_u64) else {
            worse.push(format!("{name} is not in the table"));
            continue;
        };
        println!("{name}: {count} (committed: {before})");
        if count.saturating_mul(100) > before.saturating_mul(100 + LOSS_MAX) {
            worse.push(format!("{name}: {count}, committed {before}"));
        }
    }
    let gone = committed.keys().filter(|name| !found.contains_key(*name));
    worse.extend(gone.map(|name| format!("{name} is not counted any more")));
    worse
}

/// Builds the example with optimizations.
fn build() -> Result<PathBuf> {
    let arguments = ["build", "--quiet", "--release", "-p", "dcp-engine"];
    process::run(workspace::cargo().args(arguments).args(["--example", "bench_planning"]))?;
    Ok(workspace::target()?.join("release").join("examples").join("bench_planning"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[(&str, u64)]) -> Map<String, Value> {
        rows.iter().map(|(name, count)| ((*name).to_owned(), (*count).into())).collect()
    }

    #[test]
    fn a_loss_of_more_than_a_fifth_and_a_missing_row_are_found() {
        let committed = table(&[("a", 100), ("b", 100)]);
        assert!(compare(&committed, &table(&[("a", 120), ("b", 3)])).is_empty());
        assert_eq!(compare(&committed, &table(&[("a", 121), ("b", 100)])).len(), 1);
        assert_eq!(compare(&committed, &table(&[("a", 100), ("c", 100)])).len(), 2);
    }

    #[test]
    fn the_committed_table_has_counts() {
        let text = std::fs::read_to_string(workspace::root().join(TABLE)).unwrap();
        let table: Map<String, Value> = serde_json::from_str(&text).unwrap();
        assert!(table.len() >= 20 && table.values().all(|count| count.as_u64() > Some(0)));
    }
}
