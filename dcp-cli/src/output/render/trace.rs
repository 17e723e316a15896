//! A trace as a time line of each rank, and tables of the slowest files and of requests.

use std::fmt::Write as _;

use dcp::trace::TraceSummary;
use dcp::trace::summary::{OperationSummary, PhaseSummary, RankSummary};

use crate::output::Output;
use crate::output::style::{
    Style, columns, count, left, printable, right, shorten, size, thousands,
};

/// The columns of a time line where the output is no terminal.
const WIDTH: usize = 100;
/// The columns that a file takes at most.
const FILE_MAX: usize = 48;

/// The phases, each with its mark.
const PHASES: [(&str, char); 6] =
    [("stage", '░'), ("plan", '▒'), ("write", '█'), ("read", '█'), ("wait", '·'), ("commit", '▓')];

pub(crate) fn render(summary: &TraceSummary, slowest: usize, out: &Output) -> String {
    let style = out.style;
    let mut text = String::new();
    if summary.ranks.is_empty() {
        return "the trace has no events\n".to_owned();
    }
    let mut operations: Vec<_> = summary.operations.iter().collect();
    operations.sort_by(|left, right| right.duration.total_cmp(&left.duration));
    let hidden = operations.len().saturating_sub(slowest);
    operations.truncate(slowest);
    operations.sort_by(|left, right| left.began.total_cmp(&right.began));
    for operation in operations {
        operation_lines(&mut text, operation, slowest, out);
    }
    if hidden > 0 {
        let _ = writeln!(text, "{}\n", style.dim(&format!("{hidden} faster ones are not shown")));
    }
    files(&mut text, summary, slowest, style);
    requests(&mut text, summary, style);
    text
}

fn operation_lines(text: &mut String, operation: &OperationSummary, slowest: usize, out: &Output) {
    let style = out.style;
    let title = match operation.name.as_str() {
        name @ ("save" | "load") => format!("{name} {}", operation.number),
        name => printable(name),
    };
    let _ = write!(text, "{}  {}", style.bold(&title), time(operation.duration));
    if operation.bytes > 0 {
        let _ = write!(text, "  {}", size(operation.bytes));
        let _ = write!(text, "  {}", rate(operation.bytes, operation.duration));
    }
    if operation.ranks.len() > 1 {
        let slower = format!("{:.2} times the mean", operation.imbalance);
        let _ = write!(text, "  slowest rank {} ({slower})", operation.slowest_rank);
    }
    text.push('\n');
    let mut ranks: Vec<_> = operation.ranks.iter().collect();
    ranks.sort_by(|left, right| right.work.total_cmp(&left.work));
    let hidden = ranks.len().saturating_sub(slowest);
    ranks.truncate(slowest);
    let mut used = Vec::new();
    let rows: Vec<_> = ranks
        .iter()
        .filter(|rank| !rank.phases.is_empty())
        .map(|rank| {
            let took = if rank.work > 0.0 { rank.work } else { rank.duration };
            [format!("rank {}", rank.rank), time(took), size(rank.bytes), rate(rank.bytes, took)]
        })
        .collect();
    let widths = widths(&rows);
    let beside: usize = widths.iter().map(|width| width + 2).sum::<usize>() + 4;
    let width = out.width.unwrap_or(WIDTH).saturating_sub(beside).max(10);
    for (rank, [name, took, bytes, rate]) in ranks.iter().zip(&rows) {
        let line = time_line(rank, operation, width, &mut used, style);
        let [w0, w1, w2, w3] = widths;
        let _ = writeln!(
            text,
            "  {}  │{line}│  {}  {}  {}",
            left(name, w0),
            right(took, w1),
            right(bytes, w2),
            right(rate, w3)
        );
    }
    for rank in &ranks {
        if let Some(error) = &rank.error {
            let failed = format!("rank {} failed: {}", rank.rank, printable(error));
            let _ = writeln!(text, "  {}", style.bad(&failed));
        }
    }
    if hidden > 0 {
        let more = format!("{} faster", count(hidden, "rank"));
        let _ = writeln!(text, "  {}", style.dim(&more));
    }
    let legend = PHASES.iter().enumerate().filter(|(at, _)| used.contains(at));
    let legend: Vec<_> = legend
        .map(|(at, (name, mark))| format!("{} {name}", style.hue(at, &mark.to_string())))
        .collect();
    if !legend.is_empty() {
        let _ = writeln!(text, "  {}", legend.join("  "));
    }
    text.push('\n');
}

/// The phases of a rank on the scale of the whole operation; a column shows the phase that fills
/// most of it.
fn time_line(
    rank: &RankSummary,
    operation: &OperationSummary,
    width: usize,
    used: &mut Vec<usize>,
    style: Style,
) -> String {
    let column = operation.duration / width as f64;
    let mut line = String::new();
    for at in 0..width {
        let (from, to) = (at as f64 * column, (at + 1) as f64 * column);
        let covered = |phase: &PhaseSummary| {
            let began = phase.began - operation.began;
            (began + phase.duration).min(to) - began.max(from)
        };
        let most = rank.phases.iter().max_by(|a, b| covered(a).total_cmp(&covered(b)));
        let phase = most
            .filter(|phase| covered(phase) > 0.0)
            .and_then(|phase| PHASES.iter().position(|(name, _)| *name == phase.name));
        match phase.and_then(|phase| Some((phase, PHASES.get(phase)?.1))) {
            Some((phase, mark)) => {
                if !used.contains(&phase) {
                    used.push(phase);
                }
                line.push_str(&style.hue(phase, &mark.to_string()));
            }
            None => line.push(' '),
        }
    }
    line
}

fn files(text: &mut String, summary: &TraceSummary, slowest: usize, style: Style) {
    let rows: Vec<_> = summary
        .files
        .iter()
        .take(slowest)
        .map(|file| {
            [
                shorten(&printable(&file.file), FILE_MAX),
                file.rank.to_string(),
                if file.written { "write" } else { "read" }.to_owned(),
                size(file.bytes),
                time(file.duration),
                rate(file.bytes, file.duration),
            ]
        })
        .collect();
    let titles = ["SLOWEST FILES", "RANK", "OP", "SIZE", "TIME", "RATE"];
    table(text, titles, &rows, style);
}

fn requests(text: &mut String, summary: &TraceSummary, style: Style) {
    let rows: Vec<_> = summary
        .requests
        .iter()
        .map(|one| {
            [
                printable(&one.name),
                thousands(one.count),
                thousands(one.failed),
                size(one.bytes),
                time(one.median),
                time(one.p99),
                time(one.longest),
            ]
        })
        .collect();
    let titles = ["REQUESTS", "COUNT", "FAILED", "SIZE", "MEDIAN", "P99", "LONGEST"];
    table(text, titles, &rows, style);
}

/// A table whose first column is text and whose others are numbers; nothing without rows.
fn table<const N: usize>(text: &mut String, titles: [&str; N], rows: &[[String; N]], style: Style) {
    if rows.is_empty() {
        return;
    }
    let titles = titles.map(str::to_owned);
    let mut all = vec![titles.clone()];
    all.extend_from_slice(rows);
    let widths = widths(&all);
    let line = |cells: &[String; N]| {
        let cells = cells.iter().zip(widths).enumerate();
        let cells = cells.map(|(at, (cell, width))| match at {
            0 => left(cell, width),
            _ => right(cell, width),
        });
        cells.collect::<Vec<_>>().join("  ")
    };
    let _ = writeln!(text, "{}", style.dim(line(&titles).trim_end()));
    for row in rows {
        let _ = writeln!(text, "{}", line(row));
    }
    text.push('\n');
}

fn widths<const N: usize>(rows: &[[String; N]]) -> [usize; N] {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(columns(cell));
        }
    }
    widths
}

/// Microseconds, with three digits.
fn time(micros: f64) -> String {
    let (value, unit) = match micros {
        micros if micros < 1e3 => (micros, "µs"),
        micros if micros < 1e6 => (micros / 1e3, "ms"),
        micros => (micros / 1e6, "s"),
    };
    let digits = match value {
        value if value < 10.0 => 2,
        value if value < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

fn rate(bytes: u64, micros: f64) -> String {
    if bytes == 0 || micros <= 0.0 {
        return String::new();
    }
    format!("{}/s", size((bytes as f64 / micros * 1e6) as u64))
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_have_three_digits() {
        let times = [0.0, 1.5, 42.0, 999.4, 1_000.0, 54_321.0, 2_500_000.0, 7_200_000_000.0];
        let shown = times.map(super::time);
        assert_eq!(
            shown,
            ["0.00 µs", "1.50 µs", "42.0 µs", "999 µs", "1.00 ms", "54.3 ms", "2.50 s", "7200 s"]
        );
    }
}
