//! Renders the files of a checkpoint with bars of their sizes.

use std::fmt::Write as _;

use dcp::jobs::inspect::Summary;

use crate::output::Output;
use crate::output::style::{columns, left, printable, right, shorten, size};

/// Files that are listed at most.
const LISTED: usize = 16;
const BAR: usize = 24;

pub(crate) fn render(summary: &Summary, out: &Output) -> String {
    let style = out.style;
    let files: Vec<_> = summary.files.iter().collect();
    let largest = files.iter().filter_map(|(_, len)| **len).max().unwrap_or(0);
    let mut text = String::new();
    if files.is_empty() {
        return text;
    }
    text.push('\n');
    // Of many files, those at both ends: names end in the number of the rank.
    let hidden = files.len().saturating_sub(LISTED);
    let (front, back) = if hidden > 0 { (LISTED / 2, LISTED / 2) } else { (files.len(), 0) };
    let shown = || files.iter().take(front).chain(files.iter().skip(files.len() - back));
    let name = shown().map(|(name, _)| columns(name)).max().unwrap_or(0).min(40);
    let bytes = shown().filter_map(|(_, len)| **len).map(|len| size(len).len()).max();
    let bytes = bytes.unwrap_or(0).max("missing".len());
    for (index, (file, len)) in shown().enumerate() {
        if hidden > 0 && index == front {
            let _ = writeln!(text, "{}", style.dim(&format!("… {hidden} more files")));
        }
        let file = left(&shorten(&printable(file), name), name);
        let line = match len {
            Some(len) => {
                let bar = bar(*len, largest);
                format!("{file}  {}  {}", right(&size(*len), bytes), style.hue(0, &bar))
            }
            None => format!("{file}  {}", style.bad(&right("missing", bytes))),
        };
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// A bar of eighths of a column.
fn bar(len: u64, largest: u64) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    if largest == 0 {
        return String::new();
    }
    let eighths = (len as f64 / largest as f64 * (BAR * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    if let Some(part) = EIGHTHS.get(eighths % 8).filter(|part| **part != ' ') {
        bar.push(*part);
    }
    bar
}
