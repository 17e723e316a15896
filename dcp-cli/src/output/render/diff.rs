//! Renders the report of `dcp diff`.

use std::fmt::Write as _;

use dcp::core::text::{Message, Quoted};
use dcp::jobs::diff::{Described, DiffReport, Difference, DifferenceKind, Spot, ValueDifference};
use serde_json::Value;

use crate::output::Output;
use crate::output::render::number::{float, share};
use crate::output::render::value::python;
use crate::output::render::wrap::say;
use crate::output::style::{columns, count, left, printable, shorten, size, thousands};

/// Columns of the words in front.
const WORD: usize = 6;
const GAP: usize = 2;
/// Bytes of a value that are shown.
const VALUE_MAX: usize = 60;

/// What a comparison shows besides its report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiffView<'a> {
    /// The first checkpoint.
    pub(crate) a: &'a str,
    /// The second one.
    pub(crate) b: &'a str,
    /// The most differences that are shown; 0 shows all.
    pub(crate) limit: usize,
    /// Whether values were not compared.
    pub(crate) keys_only: bool,
}

pub(crate) fn render(view: DiffView<'_>, report: &DiffReport, out: &Output) -> String {
    let style = out.style;
    let mut text = String::new();
    if !report.equal {
        for (name, uri) in [("A", view.a), ("B", view.b)] {
            let _ = writeln!(text, "{}  {}", style.bold(name), printable(uri));
        }
        text.push('\n');
    }
    let groups: Vec<&[Difference]> = report
        .differences
        .chunk_by(|a, b| std::mem::discriminant(&a.what) == std::mem::discriminant(&b.what))
        .collect();
    let limit = if view.limit == 0 { usize::MAX } else { view.limit };
    let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
    let shown = shares(&lengths, limit);
    let key = longest_key(&groups, &shown, out);
    for (group, shown) in groups.iter().zip(&shown) {
        for difference in group.iter().take(*shown) {
            line(difference, view.keys_only, key, out, &mut text);
        }
        if group.len() > *shown {
            let more = thousands((group.len() - shown) as u64);
            let more = format!("{}  … and {more} more; --limit 0 shows all", " ".repeat(WORD));
            let _ = writeln!(text, "{}", style.dim(&more));
        }
    }
    if !report.equal {
        text.push('\n');
    }
    summary(report, out, &mut text);
    text
}

/// How many of each group are shown, when all together are `limit`: none is crowded out by
/// graver ones.
fn shares(lengths: &[usize], limit: usize) -> Vec<usize> {
    let each = limit / lengths.len().max(1);
    let mut shares: Vec<usize> = lengths.iter().map(|len| (*len).min(each)).collect();
    let mut left = limit.saturating_sub(shares.iter().sum());
    for (share, len) in shares.iter_mut().zip(lengths) {
        let more = left.min(len - *share);
        *share += more;
        left -= more;
    }
    shares
}

/// The columns for keys of which everything is said in one line.
fn longest_key(groups: &[&[Difference]], shown: &[usize], out: &Output) -> usize {
    let shown = groups.iter().zip(shown).flat_map(|(group, shown)| group.iter().take(*shown));
    let short = shown.filter(|one| !matches!(one.what, DifferenceKind::Values(_)));
    let longest = short.map(|one| columns(&printable(&one.key))).max().unwrap_or(0);
    longest.min(out.width.map_or(usize::MAX, |width| width / 2))
}

fn line(difference: &Difference, keys_only: bool, longest: usize, out: &Output, text: &mut String) {
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
        .filter_map(|(side, name)| Some(format!("{} in {side}", Quoted(name.as_deref()?))))
        .collect();
    if !names.is_empty() {
        details.push(format!("named {}", names.join(", ")));
    }
    let word = style.bad(&left(word, WORD));
    let room = out.width.map_or(usize::MAX, |width| width.saturating_sub(WORD + GAP));
    if let ([detail], true) = (&*details, columns(&key) <= longest) {
        let detail = Message(detail).to_string();
        if longest.saturating_add(GAP + columns(&detail)) <= room {
            let _ = writeln!(text, "{word}  {}  {detail}", style.bold(&left(&key, longest)));
            return;
        }
    }
    let _ = writeln!(text, "{word}  {}", style.bold(&shorten(&key, room)));
    for detail in details {
        say(out, text, &" ".repeat(WORD + GAP), "", &Message(&detail).to_string());
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
        parts.push(format!("max abs {}", float(values.max_abs)));
        parts.push(format!("max rel {}", float(values.max_rel)));
    }
    if values.dtype_a != values.dtype_b {
        parts.push(format!("{} in A, {} in B", values.dtype_a, values.dtype_b));
    }
    let mut lines = vec![parts.join(" · ")];
    if let Some(first) = &values.first {
        let first = spot(first, values);
        lines.push(if values.shape.is_empty() { first } else { format!("first {first}") });
    }
    if let (Some(largest), true) = (&values.largest, values.first != values.largest) {
        lines.push(format!("worst {}", spot(largest, values)));
    }
    lines
}

fn spot(spot: &Spot, of: &ValueDifference) -> String {
    let a = python(&shortest(&spot.a, of.dtype_a), VALUE_MAX);
    let b = python(&shortest(&spot.b, of.dtype_b), VALUE_MAX);
    let place = match &*spot.index {
        [] => String::new(),
        index => format!("at {index:?}: "),
    };
    format!("{place}{a} in A, {b} in B")
}

/// A float with the digits that distinguish it from others of its dtype.
fn shortest(value: &Value, dtype: &str) -> Value {
    match value.as_f64() {
        Some(x) if value.is_f64() && dtype != "float64" => {
            (x as f32).to_string().parse().map_or_else(|_| value.clone(), |x: f64| x.into())
        }
        _ => value.clone(),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_kind_is_crowded_out() {
        assert_eq!(shares(&[100, 2, 100], 30), [18, 2, 10]);
        assert_eq!(shares(&[3, 4], 50), [3, 4]);
        assert_eq!(shares(&[9, 9], usize::MAX), [9, 9]);
        assert_eq!(shares(&[], 5), [0; 0]);
    }

    #[test]
    fn floats_have_the_digits_of_their_dtype() {
        let third = Value::from(f64::from(1.0_f32 / 3.0));
        assert_eq!(shortest(&third, "float32").to_string(), "0.33333334");
        assert_eq!(shortest(&third, "float64"), third);
        assert_eq!(shortest(&Value::from(7), "int32").to_string(), "7");
    }
}
