//! Guards speeds by ratios: each measurement against its limit on the same machine in the same run.
//!
//! Seconds depend on the machine and on its other work. A ratio is the seconds of the limit (plain
//! system calls, a copy of memory, `cp`) by ours, so it depends on both much less.
//! [`crate::rows`] measures; this module compares with the committed ratios.

use std::fmt;
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use crate::machine::machine;
use crate::rows::{self, Folders, Found};
use xtask_host::{Result, workspace};

/// The committed ratios.
const TABLE: &str = "xtask/bench/ratios.json";
/// The part of a ratio that may be lost.
const LOSS_MAX: f64 = 0.20;
const USAGE: &str =
    "usage: cargo xtask bench --check --ratios [--update] [--disk DIR] [--tmpfs DIR]";

/// Ratios by the names of their rows.
#[derive(Debug, Default)]
struct Committed {
    /// The machine and the commit of the ratios.
    machine: String,
    ratios: Map<String, Value>,
}

impl Committed {
    fn read() -> Result<Self> {
        let path = workspace::root().join(TABLE);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| format!("cannot read {TABLE}: {error}; write it with --update"))?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self> {
        let table: Value = serde_json::from_str(text)?;
        let machine = table.get("machine").and_then(Value::as_str).unwrap_or_default().to_owned();
        let ratios = table.get("ratios").and_then(Value::as_object);
        let ratios = ratios.ok_or_else(|| format!("{TABLE} has no \"ratios\""))?.clone();
        for (name, ratio) in &ratios {
            if !ratio.as_f64().is_some_and(|ratio| ratio > 0.0) {
                return Err(format!("{TABLE}: {name:?} is {ratio}, not a positive number").into());
            }
        }
        Ok(Self { machine, ratios })
    }

    fn ratio(&self, name: &str) -> Option<f64> {
        self.ratios.get(name).and_then(Value::as_f64)
    }

    /// Whether `measured` is so good that more rounds can change no verdict.
    fn is_kept(&self, name: &str, measured: f64) -> bool {
        self.ratio(name).is_some_and(|committed| loss(committed, measured) <= LOSS_MAX)
    }
}

/// Measures every row and compares it with the committed table; `--update` writes the table.
pub(crate) fn check(args: &[&str]) -> Result {
    let mut update = false;
    let mut folders = Folders { tmpfs: PathBuf::from("/dev/shm"), disk: workspace::target()? };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match *arg {
            "--update" => update = true,
            "--disk" => folders.disk = PathBuf::from(args.next().ok_or(USAGE)?),
            "--tmpfs" => folders.tmpfs = PathBuf::from(args.next().ok_or(USAGE)?),
            _ => return Err(USAGE.into()),
        }
    }
    let before = match Committed::read() {
        // The first table of all has none before it.
        Err(_) if update => Committed::default(),
        before => before?,
    };
    let machine = machine();
    // An update takes as many rounds as a row that seems to be worse.
    let found = rows::measure(&folders, &|name, ratio| !update && before.is_kept(name, ratio))?;

    println!("\n{machine}\nThe committed ratios: {}\n", before.machine);
    println!("| speed as a part of the limit's | committed | measured | loss |");
    println!("|---|---:|---:|---:|");
    let rows = compare(&before, &found);
    rows.iter().for_each(|row| println!("{row}"));
    if update {
        let table = json!({ "machine": machine, "ratios": updated(&before, &found) });
        std::fs::write(workspace::root().join(TABLE), format!("{table:#}\n"))?;
        println!("\n{TABLE} is written");
        return Ok(());
    }
    let wrong: Vec<_> = rows.iter().filter_map(Row::problem).collect();
    if wrong.is_empty() {
        println!("\nno ratio is more than {:.0} % below {TABLE}", LOSS_MAX * 100.0);
        return Ok(());
    }
    let advice = "measure again on an idle machine, find the cause, or write the table again with \
                  --update and say why";
    Err(format!("ratios differ from {TABLE}: {}; {advice}", wrong.join("; ")).into())
}

/// A row of the table, which at least one of the two sides has.
struct Row {
    name: String,
    committed: Option<f64>,
    found: Option<Found>,
}

impl Row {
    /// Why the row fails the check.
    fn problem(&self) -> Option<String> {
        let name = &self.name;
        match (self.committed, &self.found) {
            (_, Some(Found::Skipped(_))) => None,
            (Some(committed), Some(Found::Ratio(measured))) => {
                let loss = loss(committed, *measured);
                let percent = loss * 100.0;
                (loss > LOSS_MAX).then(|| {
                    format!("{name}: {measured:.2}, committed {committed:.2}, {percent:.0} % less")
                })
            }
            (None, _) => Some(format!("{name} is not in the table")),
            (Some(_), None) => Some(format!("{name} is not measured any more")),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| {} |", self.name)?;
        match self.committed {
            Some(committed) => write!(f, " {committed:.2} |")?,
            None => f.write_str(" — |")?,
        }
        match (self.committed, &self.found) {
            (_, Some(Found::Skipped(reason))) => write!(f, " SKIPPED: {reason} | — |"),
            (_, None) => f.write_str(" — | — |"),
            (None, Some(Found::Ratio(measured))) => write!(f, " {measured:.2} | — |"),
            (Some(committed), Some(Found::Ratio(measured))) => {
                let percent = loss(committed, *measured) * 100.0;
                write!(f, " {measured:.2} | {percent:.0} % |")
            }
        }
    }
}

/// The part of `committed` that `measured` lacks; negative where it is better.
fn loss(committed: f64, measured: f64) -> f64 {
    1.0 - measured / committed
}

/// Every row that was found, in its order, then those that only the table has.
fn compare(committed: &Committed, found: &[(String, Found)]) -> Vec<Row> {
    let mut rows: Vec<Row> = found
        .iter()
        .map(|(name, found)| Row {
            name: name.clone(),
            committed: committed.ratio(name),
            found: Some(found.clone()),
        })
        .collect();
    for name in committed.ratios.keys() {
        if !found.iter().any(|(found, _)| found == name) {
            rows.push(Row { name: name.clone(), committed: committed.ratio(name), found: None });
        }
    }
    rows
}

/// The new table: what was measured, and the committed ratios of rows that were skipped.
fn updated(before: &Committed, found: &[(String, Found)]) -> Map<String, Value> {
    let of_row = |(name, found): &(String, Found)| {
        let ratio = match found {
            Found::Ratio(measured) => Some((measured * 1000.0).round() / 1000.0),
            Found::Skipped(_) => before.ratio(name),
        };
        Some((name.clone(), ratio?.into()))
    };
    found.iter().filter_map(of_row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed(rows: &[(&str, f64)]) -> Committed {
        let ratios = rows.iter().map(|(name, ratio)| ((*name).to_owned(), (*ratio).into()));
        Committed { ratios: ratios.collect(), ..Committed::default() }
    }

    fn measured(rows: &[(&str, f64)]) -> Vec<(String, Found)> {
        rows.iter().map(|(name, ratio)| ((*name).to_owned(), Found::Ratio(*ratio))).collect()
    }

    fn problems(committed: &Committed, found: &[(String, Found)]) -> Vec<String> {
        compare(committed, found).iter().filter_map(Row::problem).collect()
    }

    #[test]
    fn a_loss_of_19_percent_passes_and_one_of_21_fails() {
        let before = committed(&[("save", 0.90)]);
        assert!(problems(&before, &measured(&[("save", 0.90 * 0.81)])).is_empty());
        assert!(before.is_kept("save", 0.90 * 0.81));
        let worse = problems(&before, &measured(&[("save", 0.90 * 0.79)]));
        assert_eq!(worse, ["save: 0.71, committed 0.90, 21 % less"]);
        assert!(!before.is_kept("save", 0.90 * 0.79));
    }

    #[test]
    fn a_better_row_passes() {
        let (before, found) = (committed(&[("save", 0.5)]), measured(&[("save", 1.5)]));
        assert!(problems(&before, &found).is_empty());
        assert_eq!(compare(&before, &found)[0].to_string(), "| save | 0.50 | 1.50 | -200 % |");
    }

    #[test]
    fn a_missing_row_and_a_new_one_fail() {
        let before = committed(&[("load", 1.0), ("save", 1.0)]);
        let found = measured(&[("copy", 1.0), ("save", 1.0)]);
        let wrong = ["copy is not in the table", "load is not measured any more"];
        assert_eq!(problems(&before, &found), wrong);
        assert!(!before.is_kept("copy", 9.0));
    }

    #[test]
    fn a_skipped_row_is_named_and_neither_fails_nor_leaves_the_table() {
        let before = committed(&[("gone", 1.0), ("load", 0.7), ("save", 1.0)]);
        let mut found = measured(&[("save", 0.95549)]);
        found.push(("load".into(), Found::Skipped("no disk".into())));
        found.push(("new".into(), Found::Skipped("no disk".into())));
        assert_eq!(problems(&before, &found), ["gone is not measured any more"]);
        assert_eq!(
            compare(&before, &found)[1].to_string(),
            "| load | 0.70 | SKIPPED: no disk | — |"
        );
        let table = updated(&before, &found);
        assert_eq!(Value::Object(table), json!({ "save": 0.955, "load": 0.7 }));
    }

    #[test]
    fn a_table_with_another_value_than_a_positive_number_is_refused() {
        for table in [r#"{}"#, r#"{"ratios": {"save": 0}}"#, r#"{"ratios": {"save": "1"}}"#] {
            assert!(Committed::parse(table).is_err(), "{table}");
        }
    }

    #[test]
    fn the_committed_table_has_every_row() {
        let table = Committed::read().unwrap();
        let names: Vec<&str> = table.ratios.keys().map(String::as_str).collect();
        assert!(names.len() >= 20, "{names:?}");
        assert!(!table.machine.is_empty());
    }
}
