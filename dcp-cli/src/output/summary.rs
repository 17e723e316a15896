//! The summary and notes of a command that writes.

use std::sync::Arc;

use dcp::jobs::cast::{CastCounts, CastReport};
use dcp::jobs::keys::UnmatchedPattern;
use dcp::jobs::text::{count, list, thousands};
use dcp::jobs::write::ConversionReport;

use crate::failure::Failure;
use crate::output::Output;
use crate::output::style::{columns, left, printable, right, shorten, shown, size};

/// Prints what was written, or would be.
pub(crate) fn write_summary(
    report: &ConversionReport,
    target: &str,
    json: bool,
    out: &Output,
) -> Result<(), Failure> {
    if json {
        return out.json(report);
    }
    if out.quiet {
        return Ok(());
    }
    if report.dry_run {
        out.write(&planned(report, out))?;
    }
    let mut parts = vec![count(report.tensors, "tensor")];
    if report.chunks != report.tensors {
        parts.push(count(report.chunks, "chunk"));
    }
    if report.objects > 0 {
        parts.push(count(report.objects, "object"));
    }
    if report.files.len() > 1 {
        parts.push(count(report.files.len(), "file"));
    }
    parts.push(size(report.bytes));
    let would = if report.dry_run { "would be written: " } else { "" };
    let target = shown(target);
    out.write(&format!("{target}: {would}{}\n", parts.join(", ")))?;
    notes(report, out);
    Ok(())
}

/// Prints what a cast did, and the values that it lost.
pub(crate) fn cast_notes(report: &CastReport, out: &Output) {
    let tensors = count(report.tensors.len(), "tensor");
    let Some(first) = report.tensors.values().next() else {
        return out.note("no tensor had to be cast");
    };
    let total = report.total();
    let error = total.max_relative_error;
    let rounded = if error > 0.0 && error < 5e-5 {
        "; values changed by less than 0.01 %".to_owned()
    } else if error > 0.0 {
        format!("; values changed by at most {:.2} %", error * 100.0)
    } else if total.lost_range() {
        "; no value within its range changed".to_owned()
    } else {
        "; no value changed".to_owned()
    };
    out.note(&format!("cast {tensors} to {}{rounded}", first.to));
    let lost: Vec<_> = report.lost_range().collect();
    for (what, of) in [
        ("beyond the range of the new dtype", (|c| c.out_of_range) as fn(&CastCounts) -> u64),
        ("too small for it and are zero now", |c| c.underflowed),
    ] {
        let in_tensors: Vec<_> = lost.iter().filter(|(_, cast)| of(&cast.counts) > 0).collect();
        if in_tensors.is_empty() {
            continue;
        }
        let elements = in_tensors.iter().map(|(_, cast)| of(&cast.counts)).sum();
        let names: Vec<_> = in_tensors.iter().map(|(fqn, _)| Arc::clone(fqn)).collect();
        let elements = if elements == 1 {
            "1 value is".to_owned()
        } else {
            format!("{} values are", thousands(elements))
        };
        out.note(&format!("{elements} {what}: {}", list(&names)));
    }
}

fn notes(report: &ConversionReport, out: &Output) {
    unmatched_notes(&report.unmatched, out);
    if let Some(cast) = report.cast.as_ref().filter(|_| !report.dry_run) {
        cast_notes(cast, out);
    }
    for one in &report.callables {
        out.note(&format!("Python will run {one}, when it loads the copy"));
    }
    replaced_notes(report, out);
    if let Some(version) = report.oldest_version {
        out.note(&format!(
            "Megatron-Core {version} or later loads this layout: there are more tensor-parallel ranks \
             than query groups"
        ));
    }
    if !report.left_out.is_empty() {
        let objects = count(report.left_out.len(), "object");
        out.note(&format!("left out {objects}: {}", list(&report.left_out)));
    }
    if !report.without_scale.is_empty() {
        let tensors = count(report.without_scale.len(), "quantized tensor");
        let names = list(&report.without_scale);
        out.note(&format!("wrote {tensors} as bare integers, without scale: {names}"));
    }
    if !report.tied.is_empty() {
        let tensors = count(report.tied.len(), "tied tensor");
        let names: Vec<_> = report.tied.keys().cloned().collect();
        out.note(&format!("wrote the bytes of {tensors} only once: {}", list(&names)));
    }
    if !report.raw.is_empty() {
        let tensors = count(report.raw.len(), "tensor");
        out.note(&format!(
            "stored {tensors} as bytes, because safetensors has no name for the type: {}",
            list(&report.raw)
        ));
    }
}

/// Prints the patterns that match no key.
pub(crate) fn unmatched_notes(unmatched: &[UnmatchedPattern], out: &Output) {
    for one in unmatched {
        out.note(&one.message());
    }
}

fn replaced_notes(report: &ConversionReport, out: &Output) {
    for (left_out, how) in [(false, "wrote as plain values"), (true, "left out")] {
        let classes = report.replaced.iter().filter(|object| object.left_out == left_out);
        let names: Vec<Arc<str>> = classes
            .map(|object| {
                let class = object.class.rsplit('.').next().unwrap_or_default();
                format!("{} ({class})", object.path).into()
            })
            .collect();
        if !names.is_empty() {
            let classes = "arguments of classes that some versions of Megatron-Core do not load";
            out.note(&format!("{how} {classes}: {}; `--form newest` keeps them", list(&names)));
        }
    }
}

/// The keys and files of a dry run.
fn planned(report: &ConversionReport, out: &Output) -> String {
    let width = out.width.unwrap_or(100);
    let rows: Vec<_> = report
        .keys
        .iter()
        .map(|(fqn, key)| (printable(fqn), key.dtype, format!("{:?}", key.shape), size(key.bytes)))
        .collect();
    let widest = |of: fn(&(String, &str, String, String)) -> usize| rows.iter().map(of).max();
    let dtype = widest(|row| row.1.len()).unwrap_or(0);
    let shape = widest(|row| row.2.len()).unwrap_or(0);
    let bytes = widest(|row| row.3.len()).unwrap_or(0);
    let room = width.saturating_sub(dtype + shape + bytes + 6).max(16);
    let name = widest(|row| columns(&row.0)).unwrap_or(0).min(room);
    let mut text = String::new();
    for (fqn, key_dtype, key_shape, key_bytes) in &rows {
        text.push_str(&format!(
            "{}  {}  {}  {}\n",
            left(&shorten(fqn, name), name),
            out.style.dtype(&left(key_dtype, dtype)),
            left(key_shape, shape),
            right(key_bytes, bytes)
        ));
    }
    for (file, len) in report.files.iter().filter(|_| report.files.len() > 1) {
        text.push_str(&format!(
            "{}  {}\n",
            out.style.dim("file"),
            printable(file) + ", " + &size(*len)
        ));
    }
    text
}
