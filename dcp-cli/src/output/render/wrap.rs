//! Sentences that fit the terminal.

use std::fmt::Write as _;

use crate::output::Output;
use crate::output::style::columns;

/// A line that goes on below itself, indented, when it is longer than the terminal.
pub(crate) fn say(out: &Output, text: &mut String, indent: &str, mark: &str, what: &str) {
    let width = out.width.map_or(usize::MAX, |width| width.saturating_sub(indent.len() + 2));
    let mut lead = format!("{indent}{mark}");
    for line in lines(what, width) {
        let _ = writeln!(text, "{lead}{line}");
        lead = format!("{indent}  ");
    }
}

/// A text cut between words into lines of at most `width` columns, where words allow it.
pub(crate) fn lines(what: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in what.split(' ') {
        if !line.is_empty() && columns(&line) + 1 + columns(word) > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}
