//! What `dcp prune` deletes and keeps, as a table.

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use dcp::core::text::Message;
use dcp::jobs::run::{LeftBehind, LeftBehindKind, PrunePlan, PruneReport};

use super::run::age;
use crate::output::Output;
use crate::output::style::{columns, count, left, printable, right, shorten, size};

/// The columns that a name takes at most.
const NAME_MAX: usize = 40;

pub(crate) fn plan(uri: &str, plan: &PrunePlan, out: &Output) -> String {
    let style = out.style;
    if plan.steps.is_empty() {
        let none = format!("{}: no checkpoints of steps\n", printable(uri));
        return none + &leftovers(&plan.leftovers);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let rows: Vec<_> = plan
        .steps
        .iter()
        .map(|one| {
            let modified = one.step.modified;
            [
                shorten(&printable(&one.step.name), NAME_MAX),
                if one.decision.delete { "delete" } else { "keep" }.to_owned(),
                size(one.step.bytes),
                modified.map_or_else(String::new, |then| age(now.saturating_sub(then))),
                Message(&one.decision.reason).to_string(),
            ]
        })
        .collect();
    let titles = ["NAME", "ACTION", "SIZE", "AGE", "WHY"];
    let mut widths = titles.map(columns);
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(columns(cell));
        }
    }
    let line = |cells: [&str; 5]| {
        let [name, action, bytes, age, why] = cells;
        let [w0, w1, w2, w3, _] = widths;
        [left(name, w0), left(action, w1), right(bytes, w2), right(age, w3), why.to_owned()]
    };
    let mut text = format!("{}\n", style.dim(line(titles).join("  ").trim_end()));
    for (row, one) in rows.iter().zip(&plan.steps) {
        let [name, action, bytes, age, why] = line(row.each_ref().map(String::as_str));
        let action = match one.decision.delete {
            true => style.bad(&action),
            false => style.good(&action),
        };
        let _ = writeln!(text, "{name}  {action}  {bytes}  {age}  {}", style.dim(&why));
    }
    for skipped in &plan.skipped {
        let problem = Message(&skipped.problem).to_string();
        let _ = writeln!(text, "not valid: {}: {problem}", printable(&skipped.name));
    }
    let deleted = plan.deleted().count();
    let bytes = plan.deleted().map(|step| step.bytes).fold(0, u64::saturating_add);
    let all = count(plan.steps.len(), "checkpoint");
    let _ = writeln!(text, "\n{all}, {deleted} of them to delete: {}", size(bytes));
    text + &leftovers(&plan.leftovers)
}

/// What dead writers left, a line for each.
fn leftovers(found: &[LeftBehind]) -> String {
    let mut text = String::new();
    for one in found {
        let _ = writeln!(text, "{}  {}", kind(one.kind), shown(one));
    }
    if !found.is_empty() {
        let _ = writeln!(text, "{} of dead writers to remove", counts(found));
    }
    text
}

fn kind(kind: LeftBehindKind) -> &'static str {
    match kind {
        LeftBehindKind::OpenUpload => "open upload",
        _ => "temporary file",
    }
}

/// The path, and the length where it is known.
fn shown(one: &LeftBehind) -> String {
    let bytes = one.bytes.map(|bytes| format!("  {}", size(bytes))).unwrap_or_default();
    format!("{}{bytes}", printable(&one.path))
}

fn counts(found: &[LeftBehind]) -> String {
    let uploads = found.iter().filter(|one| one.kind == LeftBehindKind::OpenUpload).count();
    let of = [(found.len() - uploads, "temporary file"), (uploads, "open upload")];
    let of = of.iter().filter(|(number, _)| *number > 0).map(|(number, what)| count(*number, what));
    of.collect::<Vec<_>>().join(" and ")
}

pub(crate) fn report(uri: &str, report: &PruneReport, out: &Output) -> String {
    let mut text = String::new();
    for one in &report.leftovers {
        let _ = writeln!(text, "removed {}  {}", kind(one.kind), shown(one));
    }
    for one in &report.deleted {
        let _ = writeln!(text, "deleted {}  {}", printable(&one.name), size(one.bytes));
    }
    let steps = out.style.bold(&count(report.deleted.len(), "checkpoint"));
    let files = count(usize::try_from(report.files).unwrap_or(usize::MAX), "file");
    let _ = write!(text, "{}: {steps} deleted, {files}, {}", printable(uri), size(report.bytes));
    if !report.leftovers.is_empty() {
        let _ = write!(text, "; {} of dead writers removed", counts(&report.leftovers));
    }
    text.push('\n');
    text
}
