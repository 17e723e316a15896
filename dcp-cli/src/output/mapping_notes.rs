//! Notes on what a mapping between model families did.

use dcp::jobs::text::{count, list};
use dcp::mapping::{Direction, MappingReport};

use super::Output;

/// Prints what a mapping did.
pub(crate) fn mapping_notes(report: &MappingReport, out: &Output) {
    let what = match report.direction {
        Direction::ToMegatron => report.program.as_deref().unwrap_or("Megatron-Core"),
        _ => "Hugging Face",
    };
    out.note(&format!(
        "mapped as {}: {} made of {} of the checkpoint, under {what}'s names",
        report.family,
        count(report.created.len(), "tensor"),
        report.used.len()
    ));
    if !report.dropped.is_empty() {
        let dropped = count(report.dropped.len(), "key");
        let belong = if report.dropped.len() == 1 { "belongs" } else { "belong" };
        out.note(&format!("{dropped} {belong} to no model: {}", list(&report.dropped)));
    }
    if !report.left_over.is_empty() {
        let left = count(report.left_over.len(), "tensor");
        out.note(&format!("left out {left} without a rule: {}", list(&report.left_over)));
    }
    for (what, rows) in [("added", &report.padded), ("left out", &report.trimmed)] {
        for (name, rows) in rows {
            let rows = count(usize::try_from(*rows).unwrap_or(usize::MAX), "row");
            out.note(&format!("{what} {rows} of padding: {name}"));
        }
    }
    for note in &report.notes {
        out.note(note);
    }
}
