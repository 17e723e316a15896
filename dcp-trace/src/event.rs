//! An event of the Trace Event Format, which Chrome defined and Perfetto reads.

use dcp_core::text::without_secrets;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One event. Times are in microseconds since 1970, so the traces of ranks on machines with
/// synchronized clocks fit together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TraceEvent {
    /// The name of a phase, or of a request.
    #[serde(default)]
    pub name: String,
    /// The category: [`PHASE`], [`REQUEST`], [`FILE`], or empty.
    #[serde(default, rename = "cat", skip_serializing_if = "String::is_empty")]
    pub category: String,
    /// The kind of the event in the format: `X` for a span, `i` for an instant, `M` for a name.
    #[serde(rename = "ph")]
    pub kind: String,
    /// The time of its begin.
    #[serde(default, rename = "ts")]
    pub micros: f64,
    /// Its duration, if it is a span.
    #[serde(default, rename = "dur", skip_serializing_if = "Option::is_none")]
    pub micros_taken: Option<f64>,
    /// The rank, which is a process of the format.
    #[serde(default, rename = "pid")]
    pub rank: u32,
    /// The row within the rank, which is a thread of the format.
    #[serde(default, rename = "tid")]
    pub row: u32,
    /// Bytes, file and the like.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub args: Map<String, Value>,
}

/// The category of phases of a save or load, and of whole saves, loads and commands.
pub const PHASE: &str = "phase";
/// The category of requests to a storage.
pub const REQUEST: &str = "request";
/// The category of files, from the start of an upload until it is complete.
pub const FILE: &str = "file";

/// A text without the secrets of URLs and without the query of a key: traces are sent to others.
fn shown(text: &str) -> String {
    let text = without_secrets(text);
    match text.split_once('?') {
        Some((name, query)) if query.contains('=') => format!("{name}?…"),
        _ => text.into_owned(),
    }
}

impl TraceEvent {
    /// A span.
    pub(crate) fn span(rank: u32, row: u32, category: &str, name: &str) -> Self {
        Self {
            name: shown(name),
            category: category.to_owned(),
            kind: "X".to_owned(),
            micros: 0.0,
            micros_taken: Some(0.0),
            rank,
            row,
            args: Map::new(),
        }
    }

    /// The name of a rank or, in `row`, of a row.
    pub(crate) fn naming(rank: u32, row: Option<u32>, name: &str) -> Self {
        let kind = if row.is_some() { "thread_name" } else { "process_name" };
        let event = Self {
            kind: "M".to_owned(),
            micros_taken: None,
            ..Self::span(rank, row.unwrap_or(0), "", kind)
        };
        event.with("name", name)
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.set(name, value);
        self
    }

    pub(crate) fn set(&mut self, name: &str, value: impl Into<Value>) {
        let value = match value.into() {
            Value::String(text) => Value::String(shown(&text)),
            value => value,
        };
        self.args.insert(name.to_owned(), value);
    }

    /// Whether this is a span of a category.
    #[must_use]
    pub fn is_span(&self, category: &str) -> bool {
        self.kind == "X" && self.category == category && self.micros_taken.is_some()
    }

    /// The duration of a span in microseconds; 0 for other events and for impossible numbers.
    #[must_use]
    pub fn duration(&self) -> f64 {
        self.micros_taken.filter(|taken| taken.is_finite() && *taken > 0.0).unwrap_or(0.0)
    }

    /// An argument that is a number.
    #[must_use]
    pub fn number(&self, name: &str) -> Option<u64> {
        self.args.get(name)?.as_u64()
    }

    /// An argument that is a text.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.args.get(name)?.as_str()
    }
}
