//! Reads and merges trace files.

use std::future::poll_fn;
use std::io::{self, Write};

use dcp_core::registry::{Access, StorageRegistry};
use dcp_core::storage::StorageExt as _;
use dcp_core::text::Quoted;
use dcp_core::{Key, StorageError};
use serde_json::Value;

use crate::event::TraceEvent;

/// The events of one or several trace files.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Trace {
    /// The events, in no particular order.
    pub events: Vec<TraceEvent>,
    /// Whether a file ends within an event, as that of a process that died.
    pub is_cut: bool,
}

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The text is no trace.
    #[error("no trace of the Trace Event Format: {problem}")]
    Invalid {
        /// The problem, with the line and column where there is one.
        problem: String,
    },
    /// One file of a folder is no trace.
    #[error("{}: no trace of the Trace Event Format: {problem}", Quoted(file))]
    File {
        /// The file.
        file: String,
        /// The problem, with the line and column where there is one.
        problem: String,
    },
    /// A folder has no file with a name that ends with `.json`.
    #[error("{} has no *.json file; name the files of the trace", Quoted(folder))]
    Empty {
        /// The folder.
        folder: String,
    },
    /// A file cannot be read.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// The largest trace file that [`Trace::open`] reads.
const FILE_BYTES_MAX: u64 = 1 << 30;

impl Trace {
    /// Reads a file of the Trace Event Format: an array of events, which may lack its end, or an
    /// object with `traceEvents`. Memory is a small multiple of the file's size.
    ///
    /// # Errors
    ///
    /// When the text is something else.
    pub fn parse(text: &[u8]) -> Result<Self, TraceError> {
        let start = text.iter().find(|byte| !byte.is_ascii_whitespace());
        match start {
            Some(b'[') => Self::parse_array(text),
            Some(b'{') => Self::parse_object(text),
            _ => {
                Err(TraceError::Invalid { problem: "the file begins with neither [ nor {".into() })
            }
        }
    }

    /// Reads the file at a URL whose name ends with `.json`, or all such files directly in a folder,
    /// which are those of the ranks of a job. A file has at most 1 GiB.
    ///
    /// # Errors
    ///
    /// When a file cannot be read or is no trace, or the folder has none.
    pub async fn open(storages: &StorageRegistry, url: &str) -> Result<Self, TraceError> {
        let (folder, name) = match url.rsplit_once('/') {
            Some((folder, name)) if name.ends_with(".json") => (format!("{folder}/"), Some(name)),
            None if url.ends_with(".json") => ("./".to_owned(), Some(url)),
            _ => (url.to_owned(), None),
        };
        let storage = storages.open(&folder, Access::Read).await?;
        let mut files = Vec::new();
        match name {
            Some(name) => files.push(Key::new(name).map_err(StorageError::from)?),
            None => {
                let mut listed = storage.list_files(None);
                while let Some(file) = poll_fn(|context| listed.as_mut().poll_next(context)).await {
                    let file = file?.key;
                    if file.as_str().ends_with(".json") {
                        files.push(file);
                    }
                }
                files.sort_unstable();
            }
        }
        if files.is_empty() {
            return Err(TraceError::Empty { folder: url.to_owned() });
        }
        let mut all = Self::default();
        for file in files {
            let text = storage.read_whole(&file, FILE_BYTES_MAX).await?.bytes;
            let problem = match Self::parse(&text) {
                Ok(trace) => {
                    all.merge(trace);
                    continue;
                }
                Err(TraceError::Invalid { problem }) => problem,
                Err(other) => return Err(other),
            };
            return Err(TraceError::File { file: file.as_str().to_owned(), problem });
        }
        Ok(all)
    }

    /// Adds the events of another rank.
    pub fn merge(&mut self, other: Self) {
        self.events.extend(other.events);
        self.is_cut |= other.is_cut;
    }

    /// Writes one file of all events, in the order of time, which Perfetto opens.
    ///
    /// # Errors
    ///
    /// When the writer fails.
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        let mut events: Vec<_> = self.events.iter().collect();
        events.sort_by(|left, right| left.micros.total_cmp(&right.micros));
        for (number, event) in events.into_iter().enumerate() {
            out.write_all(if number == 0 { b"[\n" } else { b",\n" })?;
            serde_json::to_writer(&mut out, event)?;
        }
        out.write_all(if self.events.is_empty() { b"[]\n" } else { b"\n]\n" })?;
        out.flush()
    }

    fn parse_array(text: &[u8]) -> Result<Self, TraceError> {
        if let Ok(events) = serde_json::from_slice(text) {
            return Ok(Self { events, is_cut: false });
        }
        // One event per line, as written here; the last lines may be missing.
        let mut trace = Self { events: Vec::new(), is_cut: true };
        let lines: Vec<_> = text.split(|byte| *byte == b'\n').collect();
        for (number, line) in (1..).zip(&lines) {
            let event = line.trim_ascii();
            let event = event.strip_prefix(b"[").unwrap_or(event).trim_ascii();
            let event = event.strip_suffix(b",").unwrap_or(event);
            match serde_json::from_slice(event) {
                _ if event.is_empty() => {}
                Ok(event) => trace.events.push(event),
                Err(_) if number == lines.len() => {}
                Err(error) => {
                    return Err(TraceError::Invalid { problem: format!("line {number}: {error}") });
                }
            }
        }
        Ok(trace)
    }

    fn parse_object(text: &[u8]) -> Result<Self, TraceError> {
        let problem = |error: serde_json::Error| TraceError::Invalid { problem: error.to_string() };
        let mut object: Value = serde_json::from_slice(text).map_err(problem)?;
        let events = object.get_mut("traceEvents").map(Value::take).ok_or_else(|| {
            TraceError::Invalid { problem: "the object has no traceEvents".into() }
        })?;
        Ok(Self { events: serde_json::from_value(events).map_err(problem)?, is_cut: false })
    }
}
