//! What `dcp diff` found.

use std::fmt::Write as _;

use dcp::convert::{Described, DiffReport, Difference, DifferenceKind, Spot, ValueDifference};
use serde_json::Value;

use crate::command::Diff;
use crate::output::Output;
use crate::render::number::{float, share};
use crate::render::value::python;
use crate::render::wrap::say;
use crate::style::{count, left, printable, shorten, size, thousands};

/// Columns of the words in front.
const WORD: usize = 6;
/// Bytes of a value that are shown.
const VALUE_MAX: usize = 60;

pub(crate) fn render(args: &Diff, report: &DiffReport, out: &Output) -> String {
    let style = out.style;
    let mut text = String::new();
    if !report.equal {
        for (name, uri) in [("A", &args.a), ("B", &args.b)] {
            let _ = writeln!(text, "{}  {}", style.bold(name), printable(uri));
        }
        text.push('\n');
    }
    let limit = if args.limit == 0 { usize::MAX } else { args.limit };
    for difference in report.differences.iter().take(limit) {
        line(difference, args.keys_only, out, &mut text);
    }
    let hidden = report.differences.len().saturating_sub(limit);
    if hidden > 0 {
        let more = thousands(hidden as u64);
        let _ = writeln!(text, "{}", style.dim(&format!("… and {more} more; --limit 0 shows all")));
    }
    if !report.equal {
        text.push('\n');
    }
    summary(report, out, &mut text);
    text
}

fn line(difference: &Difference, keys_only: bool, out: &Output, text: &mut String) {
    let style = out.style;
    let key = printable(&difference.key);
    let (word, mut details) = match &difference.what {
        DifferenceKind::Kind { a, b } => {
            ("kind", vec![format!("{} in A, {} in B", described(a), described(b))])
        }
        DifferenceKind::Shape { a, b } => {
            ("shape", vec![format!("{} in A, {} in B", described(a), described(b))])
        }
        DifferenceKind::OnlyInA { a } => ("only A", vec![described(a)]),
        DifferenceKind::OnlyInB { b } => ("only B", vec![described(b)]),
        DifferenceKind::Values(values) => ("values", self::values(values)),
        DifferenceKind::Object { path, a, b, missing } => {
            ("object", vec![object(path, a, b, *missing)])
        }
        DifferenceKind::Dtype { a, b, comparable } => {
            let (a, b) = (dtype(a), dtype(b));
            let equal = match (comparable, keys_only) {
                (false, _) => "; values of the two cannot be compared",
                (true, true) => "",
                (true, false) => "; the values are equal",
            };
            ("dtype", vec![format!("{a} in A, {b} in B{equal}")])
        }
        _ => ("other", Vec::new()),
    };
    let names = [("A", &difference.key_a), ("B", &difference.key_b)];
    let names: Vec<_> = names
        .iter()
        .filter_map(|(side, name)| Some(format!("{:?} in {side}", name.as_deref()?)))
        .collect();
    if !names.is_empty() {
        details.push(format!("named {}", names.join(", ")));
    }
    let room = out.width.map_or(usize::MAX, |width| width.saturating_sub(WORD + 2));
    let shown = style.bold(&shorten(&key, room));
    let _ = writeln!(text, "{}  {shown}", style.bad(&left(word, WORD)));
    for detail in details {
        say(out, text, &" ".repeat(WORD + 2), "", &printable(&detail));
    }
}

fn described(what: &Described) -> String {
    match what {
        Described::Tensor { dtype, shape } => format!("{dtype} {shape:?}"),
        _ => "object".to_owned(),
    }
}

fn dtype(what: &Described) -> &str {
    match what {
        Described::Tensor { dtype, .. } => dtype,
        _ => "object",
    }
}

fn values(values: &ValueDifference) -> Vec<String> {
    let (different, all) = (values.different, values.count);
    let mut parts = vec![format!(
        "{} of {} elements differ ({})",
        thousands(different),
        thousands(all),
        share(different, all)
    )];
    if values.nan_mismatches > 0 {
        parts.push(format!("{} NaN on one side only", thousands(values.nan_mismatches)));
    }
    if values.max_abs > 0.0 {
        parts.push(format!("at most by {}", float(values.max_abs)));
        parts.push(format!("relative {}", float(values.max_rel)));
    }
    if values.dtype_a != values.dtype_b {
        parts.push(format!("{} in A, {} in B", values.dtype_a, values.dtype_b));
    }
    let mut lines = vec![parts.join(" · ")];
    if let Some(first) = &values.first {
        lines.push(format!("first {}", spot(first)));
    }
    if let (Some(largest), true) = (&values.largest, values.first != values.largest) {
        lines.push(format!("worst {}", spot(largest)));
    }
    lines
}

fn spot(spot: &Spot) -> String {
    let (a, b) = (python(&spot.a, VALUE_MAX), python(&spot.b, VALUE_MAX));
    format!("at {:?}: {a} in A, {b} in B", spot.index)
}

fn object(path: &str, a: &Value, b: &Value, missing: Option<&str>) -> String {
    let side = |value: &Value, side: &str| match missing {
        Some(missing) if missing == side => "nothing".to_owned(),
        _ => python(value, VALUE_MAX),
    };
    let place = if path.is_empty() { String::new() } else { format!("at {path}: ") };
    format!("{place}{} in A, {} in B", side(a, "a"), side(b, "b"))
}

/// What was compared, and how many differences of which kind there are.
fn summary(report: &DiffReport, out: &Output, text: &mut String) {
    let (style, compared, counts) = (out.style, &report.compared, &report.counts);
    let mut what =
        format!("{} and {}", count(compared.tensors, "tensor"), count(compared.objects, "object"));
    what.push_str(match compared.values {
        true => " compared",
        false => " compared by name, shape and dtype only",
    });
    if compared.bytes > 0 {
        let _ = write!(what, ", {} read", size(compared.bytes));
    }
    if report.equal {
        say(out, text, "", &style.good("= "), &format!("no difference: {what}"));
        return;
    }
    let kinds = [
        (counts.kind, "of another kind"),
        (counts.shape, "of another shape"),
        (counts.only_in_a, "only in A"),
        (counts.only_in_b, "only in B"),
        (counts.values, "with other values"),
        (counts.object, if counts.object == 1 { "other object" } else { "other objects" }),
        (counts.dtype, "of another dtype"),
    ];
    let kinds: Vec<_> = kinds
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, kind)| format!("{} {kind}", thousands(*count as u64)))
        .collect();
    let differences = count(report.differences.len(), "difference");
    say(out, text, "", &style.bad("≠ "), &format!("{differences}: {}", kinds.join(", ")));
    say(out, text, "  ", "", &what);
}
