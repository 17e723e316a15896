//! Saves and commands that are disturbed at every operation, counted in one table.
//!
//! The tests do the work: each appends its counts to the file that `DCP_TORTURE_REPORT` names. What
//! it means for one to pass is said there. `DCP_TORTURE_SEEDS` is the number of random losses that
//! are tried at each point of a crash.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::{Value, json};

use xtask_host::process::{self, Scratch};
use xtask_host::{Result, workspace};

/// Which tests: the arguments of `cargo test` and a filter.
const TESTS: &[(&[&str], &[&str])] = &[
    (&["-p", "dcp-storage-fs", "--test", "crash"], &[]),
    (&["-p", "dcp-cli", "--lib"], &["every_operation"]),
    (
        &["-p", "distcp", "--test", "it"],
        &["crashes::", "disturbed::", "kills::", "ranks::", "megatron::", "clock"],
    ),
];

/// Runs the tests and prints the table.
pub(crate) fn main(args: &[&str]) -> Result {
    let (mut as_json, mut seeds) = (false, 20);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--json" => as_json = true,
            "--seeds" => seeds = args.next().ok_or("--seeds needs a number")?.parse::<u32>()?,
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let begin = Instant::now();
    let scratch = Scratch::new(&workspace::target()?, "torture", false)?;
    let report = scratch.path().join("report");
    for (package, filters) in TESTS {
        let mut test = workspace::cargo();
        test.args(["test", "--quiet"]).args(*package).arg("--").args(*filters);
        test.env("DCP_TORTURE_REPORT", &report);
        test.env("DCP_TORTURE_SEEDS", seeds.to_string());
        process::run(&mut test)?;
    }
    let lines = std::fs::read_to_string(&report)?;
    let rows: Vec<Value> =
        lines.lines().map(serde_json::from_str).collect::<std::result::Result<_, _>>()?;
    let rows = together(&rows);
    if as_json {
        println!("{}", serde_json::to_string_pretty(&json!({ "rows": rows }))?);
        return Ok(());
    }
    print(&rows);
    println!("\n{} s", begin.elapsed().as_secs());
    Ok(())
}

/// One row for each thing that was disturbed in one way.
fn together(rows: &[Value]) -> Vec<Value> {
    let mut all: BTreeMap<(String, String), Value> = BTreeMap::new();
    for row in rows {
        let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
        let sum = all.entry((text("what"), text("how"))).or_insert_with(|| json!({ "found": {} }));
        sum["what"] = row["what"].clone();
        sum["how"] = row["how"].clone();
        sum["models"] = row["models"].clone();
        for name in ["points", "states"] {
            sum[name] = json!(number(&sum[name]) + number(&row[name]));
        }
        for (name, count) in row["found"].as_object().into_iter().flatten() {
            sum["found"][name] = json!(number(&sum["found"][name]) + number(count));
        }
    }
    all.into_values().collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn print(rows: &[Value]) {
    println!("| what | how | points | models | states | found |");
    println!("|---|---|---:|---:|---:|---|");
    let (mut points, mut cases, mut states) = (0, 0, 0);
    for row in rows {
        let found = row["found"].as_object().into_iter().flatten();
        let found: Vec<_> = found.map(|(name, count)| format!("{count} {name}")).collect();
        let text = |name: &str| row[name].as_str().unwrap_or_default();
        println!(
            "| {} | {} | {} | {} | {} | {} |",
            text("what"),
            text("how"),
            row["points"],
            row["models"],
            row["states"],
            found.join(", ")
        );
        points += number(&row["points"]);
        cases += number(&row["points"]) * number(&row["models"]);
        states += number(&row["states"]);
    }
    println!("| all | | {points} | | {states} | {cases} points times models |");
}
