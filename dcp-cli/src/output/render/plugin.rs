//! Renders what the framework of a plug-in says of a checkpoint, as far as it is plain facts.

use std::fmt::Write as _;

use dcp::core::text::Message;
use dcp::jobs::framework::PluginReport;
use serde_json::Value;

use crate::output::Output;
use crate::output::style::{columns, left};

/// Columns that the names of facts take at least.
const NAME: usize = 10;

/// The lines that come before the tree: a line for each number, text, and truth value of the report.
pub(crate) fn facts(report: &PluginReport, out: &Output) -> String {
    let facts = report.json().as_object().into_iter().flatten().filter_map(|(name, value)| {
        let value = match value {
            Value::String(text) => text.clone(),
            Value::Number(_) | Value::Bool(_) => value.to_string(),
            Value::Null | Value::Array(_) | Value::Object(_) => return None,
        };
        Some((name.replace('_', " "), value))
    });
    let facts: Vec<_> = facts.map(|(name, value)| (Message(&name).to_string(), value)).collect();
    let widest = facts.iter().map(|(name, _)| columns(name)).max().unwrap_or(0).max(NAME);
    let mut text = String::new();
    for (name, value) in facts {
        let name = left(&name, widest);
        let _ = writeln!(text, "{} {}", out.style.dim(&name), Message(&value));
    }
    if !text.is_empty() {
        text.push('\n');
    }
    text
}
