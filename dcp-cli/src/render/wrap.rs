//! Sentences that fit the terminal.

use std::fmt::Write as _;

use crate::output::Output;
use crate::style::columns;

/// A line that goes on below itself, indented, when it is longer than the terminal.
pub(crate) fn say(out: &Output, text: &mut String, indent: &str, mark: &str, what: &str) {
    let width = out.width.map_or(usize::MAX, |width| width.saturating_sub(indent.len() + 2));
    let mut line = String::new();
    let mut lead = format!("{indent}{mark}");
    for word in what.split(' ') {
        if !line.is_empty() && columns(&line) + 1 + columns(word) > width {
            let _ = writeln!(text, "{lead}{line}");
            lead = format!("{indent}  ");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    let _ = writeln!(text, "{lead}{line}");
}
