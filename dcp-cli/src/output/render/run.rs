//! The checkpoints of a run as a table.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use dcp::core::text::Message;
use dcp::jobs::listing::{RunEntry, RunListing};

use crate::output::Output;
use crate::output::style::{columns, count, left, printable, right, shorten, size};

/// The columns that a name takes at most.
const NAME_MAX: usize = 40;

pub(crate) fn render(uri: &str, listing: &RunListing, out: &Output) -> String {
    let style = out.style;
    if listing.entries.is_empty() {
        return format!("{}: no checkpoints\n", printable(uri));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let rows: Vec<[String; 5]> = listing
        .entries
        .iter()
        .map(|entry| {
            [
                shorten(&printable(&entry.name), NAME_MAX),
                entry.kind.to_string(),
                state(entry).to_owned(),
                size(entry.bytes),
                entry.modified.map_or_else(String::new, |then| age(now.saturating_sub(then))),
            ]
        })
        .collect();
    let titles = ["NAME", "KIND", "STATE", "SIZE", "AGE"];
    let mut widths = titles.map(columns);
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(columns(cell));
        }
    }
    let line = |cells: [&str; 5]| {
        let [name, kind, state, bytes, age] = cells;
        let [w0, w1, w2, w3, w4] = widths;
        [left(name, w0), left(kind, w1), left(state, w2), right(bytes, w3), right(age, w4)]
    };
    let has_notes = |entry: &RunEntry| notes(entry, is_latest(listing, entry)).next().is_some();
    let mut titles = line(titles).join("  ");
    if listing.entries.iter().any(has_notes) {
        titles.push_str("  NOTE");
    }
    let mut text = format!("{}\n", style.dim(titles.trim_end()));
    for (row, entry) in rows.iter().zip(&listing.entries) {
        let [name, kind, state, bytes, age] = line(row.each_ref().map(String::as_str));
        let state = match entry.complete {
            Some(true) => style.good(&state),
            _ => style.bad(&state),
        };
        let is_latest = is_latest(listing, entry);
        let name = if is_latest { style.bold(&name) } else { name };
        let mut row = format!("{name}  {kind}  {state}  {bytes}  {age}");
        for note in notes(entry, is_latest) {
            row.push_str(&format!("  {note}"));
        }
        let _ = writeln!(text, "{}", row.trim_end());
        if let Some(problem) = &entry.problem {
            let _ = writeln!(text, "  {}", style.dim(&Message(problem).to_string()));
        }
    }
    let whole = listing.entries.iter().filter(|entry| entry.complete == Some(true)).count();
    let all = count(listing.entries.len(), "checkpoint");
    let _ = writeln!(text, "\n{all}, {whole} of them complete");
    text
}

fn state(entry: &RunEntry) -> &'static str {
    match entry.complete {
        Some(true) => "complete",
        Some(false) => "incomplete",
        None => "unknown",
    }
}

fn is_latest(listing: &RunListing, entry: &RunEntry) -> bool {
    listing.latest.as_ref() == Some(&entry.name)
}

fn notes(entry: &RunEntry, is_latest: bool) -> impl Iterator<Item = &'static str> {
    let ephemeral = entry.ephemeral == Some(true);
    [(is_latest, "latest"), (ephemeral, "ephemeral")].into_iter().filter(|(is, _)| *is).map(|n| n.1)
}

/// How long ago that is, in the largest unit of which there is more than one.
pub(super) fn age(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let unit = UNITS.iter().find(|(unit, _)| seconds >= 2 * unit);
    let (unit, name) = unit.copied().unwrap_or((1, "s"));
    format!("{} {name}", seconds / unit)
}

#[cfg(test)]
mod tests {
    use super::age;

    #[test]
    fn ages() {
        for (seconds, text) in
            [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")]
        {
            assert_eq!(age(seconds), text);
        }
    }
}
