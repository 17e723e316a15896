//! Renders the report of `dcp stats`: a line per tensor, or one tensor with its histogram.

use std::fmt::Write as _;

use dcp::jobs::stats::{BadChunk, FloatRange, NumberStats, StatsReport, TensorStats};

use crate::output::Output;
use crate::output::render::number::{compact, float, share};
use crate::output::render::spark::{Scale, Spark};
use crate::output::render::wrap::say;
use crate::output::style::{columns, count, left, printable, right, shorten, size, thousands};

/// The least columns of a name.
const NAME_MIN: usize = 12;
/// As wide as a name may get before others lose a column for it.
const NAME_WANTED: usize = 24;
const GAP: usize = 2;
/// Columns of the small histograms.
const SPARK: usize = 12;
/// Chunks that are named for one tensor, and values for all objects.
const PLACES: usize = 8;

/// A column of the table.
struct Column {
    title: &'static str,
    cell: fn(&TensorStats) -> String,
    /// Words, and not numbers.
    words: bool,
    /// What a narrow terminal can do without goes first.
    rank: u8,
}

const COLUMNS: &[Column] = &[
    Column { title: "dtype", cell: |t| t.dtype.to_owned(), words: true, rank: 3 },
    Column { title: "shape", cell: |t| format!("{:?}", t.shape), words: true, rank: 1 },
    Column { title: "min", cell: |t| compact(t.numbers.min), words: false, rank: 7 },
    Column { title: "max", cell: |t| compact(t.numbers.max), words: false, rank: 8 },
    Column { title: "mean", cell: |t| maybe(t.numbers.mean), words: false, rank: 5 },
    Column { title: "std", cell: |t| maybe(t.numbers.std), words: false, rank: 6 },
    Column { title: "zero", cell: zero, words: false, rank: 2 },
];

fn maybe(x: Option<f64>) -> String {
    x.map_or_else(|| "-".to_owned(), float)
}

fn zero(tensor: &TensorStats) -> String {
    match tensor.numbers.zero {
        0 => "0".to_owned(),
        zeros => share(zeros, tensor.numbers.count),
    }
}

/// All tensors, and what is in the objects. With `only_bad`, the report holds no others.
pub(crate) fn table(uri: &str, report: &StatsReport, only_bad: bool, out: &Output) -> String {
    let style = out.style;
    let mut text = format!("{}\n\n", style.bold(&printable(uri)));
    if !report.tensors.is_empty() {
        lines(report, out, &mut text);
        text.push('\n');
    }
    objects(report, out, &mut text);
    summary(report, only_bad, out, &mut text);
    text
}

fn lines(report: &StatsReport, out: &Output, text: &mut String) {
    let style = out.style;
    let cells: Vec<Vec<String>> = report
        .tensors
        .values()
        .map(|tensor| COLUMNS.iter().map(|column| (column.cell)(tensor)).collect())
        .collect();
    let widths: Vec<usize> = (0..COLUMNS.len())
        .map(|at| {
            let cells = cells.iter().filter_map(|row| row.get(at));
            let widest = cells.map(|cell| columns(cell)).max().unwrap_or(0);
            widest.max(COLUMNS.get(at).map_or(0, |column| column.title.len()))
        })
        .collect();
    let names: Vec<String> = report.tensors.keys().map(|name| printable(name)).collect();
    let widest = names.iter().map(|name| columns(name)).max().unwrap_or(0).max("tensor".len());
    let mut shown = vec![true; COLUMNS.len()];
    let fixed = |shown: &[bool]| -> usize {
        let used = widths.iter().zip(shown).filter(|(_, shown)| **shown);
        used.map(|(width, _)| width + GAP).sum::<usize>() + GAP + SPARK
    };
    let mut ranks: Vec<usize> = (0..COLUMNS.len()).collect();
    ranks.sort_by_key(|at| COLUMNS.get(*at).map(|column| column.rank));
    for at in ranks {
        let Some(width) = out.width else { break };
        if fixed(&shown) + widest.min(NAME_WANTED) <= width {
            break;
        }
        if let Some(shown) = shown.get_mut(at) {
            *shown = false;
        }
    }
    let room = out.width.map(|width| width.saturating_sub(fixed(&shown)).max(NAME_MIN));
    let name = room.map_or(widest, |room| widest.min(room));
    let row = |first: &str, cells: &dyn Fn(usize) -> String| {
        let mut line = left(&shorten(first, name), name);
        for (at, column) in COLUMNS.iter().enumerate() {
            let (Some(width), Some(true)) = (widths.get(at), shown.get(at)) else { continue };
            let cell = cells(at);
            let cell = if column.words { left(&cell, *width) } else { right(&cell, *width) };
            line.push_str(&" ".repeat(GAP));
            line.push_str(&cell);
        }
        line
    };
    let scale = Scale::of(report.tensors.values().map(|tensor| &tensor.numbers.histogram), SPARK);
    let title = row("tensor", &|at| COLUMNS.get(at).map_or("", |c| c.title).to_owned());
    let _ = writeln!(text, "{}", style.dim(&format!("{title}  {}", scale.title())));
    for ((fqn, tensor), cells) in names.iter().zip(report.tensors.values()).zip(&cells) {
        let line = row(fqn, &|at| cells.get(at).cloned().unwrap_or_default());
        let spark = Spark::new(&scale, &tensor.numbers.histogram).to_string();
        let line = format!("{line}  {}", style.hue(0, &spark));
        let _ = writeln!(text, "{}", line.trim_end());
        if tensor.numbers.non_finite() > 0 {
            bad(tensor, out, text);
        }
    }
}

/// Where the NaNs and infinities of a tensor are.
fn bad(tensor: &TensorStats, out: &Output, text: &mut String) {
    let numbers = &tensor.numbers;
    let first = tensor.first_non_finite.as_deref().unwrap_or_default();
    let what = format!("{}; the first at {first:?}", amount(numbers.nan, numbers.inf()));
    say(out, text, "  ", &out.style.bad("✗ "), &what);
    for chunk in tensor.non_finite_chunks.iter().take(PLACES) {
        say(out, text, "    ", "", &place(chunk, tensor.shape.is_empty()));
    }
    let hidden = tensor.non_finite_chunk_count.saturating_sub(PLACES as u64);
    if hidden > 0 {
        let _ = writeln!(text, "    … and {} more shards", thousands(hidden));
    }
}

fn place(chunk: &BadChunk, scalar: bool) -> String {
    let mut parts = Vec::new();
    if let Some(file) = &chunk.file {
        parts.push(printable(file));
    }
    if let Some(rank) = chunk.rank {
        parts.push(format!("rank {rank}"));
    }
    if !scalar {
        let ranges = chunk.offsets.iter().zip(&chunk.sizes);
        let ranges: Vec<_> = ranges.map(|(at, len)| format!("{at}:{}", at + len)).collect();
        parts.push(format!("shard [{}]", ranges.join(", ")));
    }
    parts.push(format!("{}, first at {:?}", amount(chunk.nan, chunk.inf), chunk.first));
    parts.join(" · ")
}

fn amount(nan: u64, inf: u64) -> String {
    match (nan, inf) {
        (nan, 0) => format!("{} NaN", thousands(nan)),
        (0, inf) => format!("{} Inf", thousands(inf)),
        (nan, inf) => format!("{} NaN and {} Inf", thousands(nan), thousands(inf)),
    }
}

fn objects(report: &StatsReport, out: &Output, text: &mut String) {
    let found = &report.objects.non_finite;
    if found.is_empty() {
        return;
    }
    for bad in found.iter().take(PLACES) {
        let what = format!("{}{} is {}", printable(&bad.key), printable(&bad.path), bad.value);
        say(out, text, "", &out.style.bad("✗ "), &what);
    }
    if found.len() > PLACES {
        let hidden = thousands((found.len() - PLACES) as u64);
        let _ = writeln!(text, "  … and {hidden} more in objects; --json lists them");
    }
    text.push('\n');
}

/// The last lines: everything together, and the verdict.
fn summary(report: &StatsReport, only_bad: bool, out: &Output, text: &mut String) {
    let (style, total) = (out.style, &report.total);
    let mut parts = vec![format!("{} in tensors", numbered(total.count, "number"))];
    if total.count > 0 {
        parts.push(format!("{} zero", share(total.zero, total.count)));
    }
    for (what, number) in [("subnormal", total.subnormal), ("near overflow", total.near_overflow)] {
        if number > 0 {
            parts.push(format!("{} {what}", thousands(number)));
        }
    }
    if report.objects.numbers > 0 {
        parts.push(format!("{} in objects", numbered(report.objects.numbers, "float")));
    }
    say(out, text, "", "", &parts.join(" · "));
    let (nan, inf) = (total.nan + report.objects.nan, total.inf() + report.objects.inf);
    if nan + inf == 0 {
        let _ = writeln!(text, "{} no NaN, no infinity", style.good("✓"));
        return;
    }
    let bad = report.tensors.values().filter(|tensor| tensor.numbers.non_finite() > 0).count();
    let mut what = amount(nan, inf);
    if bad > 0 {
        let _ = write!(what, " in {}", count(bad, "tensor"));
    }
    if !report.objects.non_finite.is_empty() {
        what.push_str(if bad > 0 { " and in objects" } else { " in objects" });
    }
    if !only_bad && report.tensors.len() > 40 {
        what.push_str("; --nan shows only these");
    }
    say(out, text, "", &style.bad("✗ "), &what);
}

fn numbered(number: u64, what: &str) -> String {
    count(usize::try_from(number).unwrap_or(usize::MAX), what)
}

/// One tensor: its numbers, and its histogram with a line for every power of two.
pub(crate) fn one(fqn: &str, tensor: &TensorStats, out: &Output) -> String {
    let (style, numbers) = (out.style, &tensor.numbers);
    let mut text = String::new();
    let _ = writeln!(text, "{}", style.bold(&printable(fqn)));
    let what = format!("{} {:?}, {}", tensor.dtype, tensor.shape, size(tensor.bytes));
    let _ = writeln!(text, "{}\n", style.dim(&what));
    let mut facts = vec![
        ("numbers", thousands(numbers.count)),
        ("min", compact(numbers.min)),
        ("max", compact(numbers.max)),
        ("mean", maybe(numbers.mean)),
        ("std", maybe(numbers.std)),
        ("zero", with_share(numbers.zero, numbers.count)),
    ];
    let range = tensor.dtype.parse().ok().and_then(FloatRange::of);
    if let Some(range) = range {
        facts.push(("subnormal", with_share(numbers.subnormal, numbers.count)));
        if let (Some((_, top)), true) = (numbers.histogram.range(), range.has_infinity) {
            let left = range.max_exponent - top;
            facts.push((
                "headroom",
                match left {
                    0 => "none: twice the largest is infinite".to_owned(),
                    left => format!("2^{left} to the largest {}", tensor.dtype),
                },
            ));
        }
    }
    for (name, value) in facts {
        let _ = writeln!(text, "{}  {value}", style.dim(&left(name, 9)));
    }
    if numbers.non_finite() > 0 {
        bad(tensor, out, &mut text);
    }
    text.push('\n');
    histogram(numbers, range, out, &mut text);
    text
}

fn with_share(part: u64, all: u64) -> String {
    if part == 0 { "0".to_owned() } else { format!("{} ({})", thousands(part), share(part, all)) }
}

/// Lines that a histogram may take; more powers of two share lines.
const HEIGHT: i32 = 40;
const BAR_MAX: usize = 60;

/// Negative numbers to the left, positive ones to the right, the largest at the top.
fn histogram(numbers: &NumberStats, range: Option<FloatRange>, out: &Output, text: &mut String) {
    let style = out.style;
    let Some((low, high)) = numbers.histogram.range() else { return };
    let (low, high) = (i32::from(low), i32::from(high));
    let step = (high - low + 1).div_euclid(HEIGHT) + i32::from((high - low + 1) % HEIGHT != 0);
    let mut rows: Vec<(i32, u64, u64)> = Vec::new();
    let mut from = low.div_euclid(step) * step;
    while from <= high {
        let inside = numbers
            .histogram
            .bins()
            .filter(|(exponent, ..)| (from..from + step).contains(&i32::from(*exponent)));
        let (negative, positive) =
            inside.fold((0, 0), |(n, p), (_, negative, positive)| (n + negative, p + positive));
        rows.push((from, negative, positive));
        from += step;
    }
    let most = rows.iter().map(|(_, n, p)| *n.max(p)).max().unwrap_or(1).max(1);
    let any_negative = rows.iter().any(|(_, negative, _)| *negative > 0);
    let label = |from: i32| match step {
        1 => format!("2^{from}"),
        _ => format!("2^{from}…{}", from + step - 1),
    };
    let labels = rows.iter().map(|row| columns(&label(row.0))).max().unwrap_or(0);
    let values = rows.iter().map(|row| float(2_f64.powi(row.0)).len()).max().unwrap_or(0);
    let counts = rows.iter().map(|row| thousands(row.1 + row.2).len()).max().unwrap_or(0);
    let notes = if range.is_some() { "  subnormal".len() } else { 0 };
    let used = labels + values + counts + 4 * GAP + notes + 1;
    let room = out.width.unwrap_or(100).saturating_sub(used);
    let bar = if any_negative { room / 2 } else { room }.clamp(4, BAR_MAX);
    let _ = writeln!(
        text,
        "{}",
        style.dim(if any_negative {
            "magnitudes: negative numbers to the left, positive ones to the right"
        } else {
            "magnitudes"
        })
    );
    for (from, negative, positive) in rows.into_iter().rev() {
        let length = |count: u64| count as f64 / most as f64 * bar as f64;
        let to_left = reversed_bar(length(negative));
        let mut line = format!(
            "{}  {}  {}  ",
            style.dim(&right(&label(from), labels)),
            right(&float(2_f64.powi(from)), values),
            right(&thousands(negative + positive), counts),
        );
        if any_negative {
            line.push_str(&style.hue(1, &right(&to_left, bar)));
        }
        let _ = write!(line, "│{}", style.hue(0, &left(&bar_of(length(positive)), bar)));
        let note = range.map_or("", |range| {
            let (first, last) = (from, from + step - 1);
            if last < i32::from(range.min_exponent) {
                "  subnormal"
            } else if range.has_infinity && (first..=last).contains(&i32::from(range.max_exponent))
            {
                "  overflow"
            } else {
                ""
            }
        });
        line.push_str(&style.bad(note));
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

/// A bar of so many columns, in eighths; what is not nothing is seen.
fn bar_of(length: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (length * 8.0).round() as usize;
    let eighths = if length > 0.0 { eighths.max(1) } else { 0 };
    let rest = EIGHTHS.get(eighths % 8).copied().unwrap_or_default();
    format!("{}{rest}", "█".repeat(eighths / 8))
}

/// The same, growing to the left, where there are only halves.
fn reversed_bar(length: f64) -> String {
    let halves = (length * 2.0).round() as usize;
    let whole = "█".repeat(halves / 2);
    match (halves, length > 0.0) {
        (0, true) => "▕".to_owned(),
        _ if halves % 2 == 1 => format!("▐{whole}"),
        _ => whole,
    }
}
