//! Records events.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dcp_core::Rank;

use crate::event::TraceEvent;

/// A trace that is being recorded, of one or several ranks of this process; clones share it.
///
/// The file is a JSON array of the Trace Event Format with one event per line, which Perfetto and
/// `chrome://tracing` open. A process that dies leaves an array without an end, which they and
/// [`Trace`](crate::Trace) read too.
///
/// A failing write ends the recording and never the save; [`finish`](Self::finish) returns its error.
#[derive(Clone)]
pub struct TraceRecorder(Arc<Shared>);

struct Shared {
    began: Instant,
    epoch: Duration,
    state: Mutex<State>,
}

struct State {
    /// `None` after an error, and at the end.
    out: Option<Box<dyn Write + Send>>,
    error: Option<io::Error>,
    empty: bool,
    ranks: HashMap<Rank, Rows>,
}

/// The rows of a rank.
#[derive(Debug, Default)]
struct Rows {
    /// Whether each row of requests is in use: concurrent requests are in different rows.
    requests: Vec<bool>,
    /// Fixed rows with a name.
    named: Vec<u32>,
}

/// The first row of requests; rows before it are those of phases.
const FIRST_REQUEST_ROW: u32 = 10;

/// Creates a file for a trace. Of files that exist, only a trace is replaced: a link, a device, a pipe and
/// any other file stay as they are.
///
/// # Errors
///
/// [`AlreadyExists`](io::ErrorKind::AlreadyExists) for a file that is no trace; those of the file
/// system.
pub fn create_trace(path: &Path) -> io::Result<File> {
    let create = || OpenOptions::new().write(true).create_new(true).open(path);
    match create() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => return created,
    }
    let refused = |what: &str| {
        let problem = format!("{what} is there, and only a trace is replaced; name another file");
        Err(io::Error::new(io::ErrorKind::AlreadyExists, problem))
    };
    let kind = std::fs::symlink_metadata(path)?.file_type();
    match kind {
        _ if kind.is_symlink() => return refused("a link"),
        _ if kind.is_dir() => return refused("a folder"),
        _ if !kind.is_file() => return refused("a device, a pipe or a socket"),
        _ => {}
    }
    let mut beginning = Vec::new();
    File::open(path)?.take(BEGINNING).read_to_end(&mut beginning)?;
    let has_event = beginning.windows(5).any(|piece| piece == b"\"ph\":");
    let is_trace = match beginning.as_slice() {
        [] | b"[" | b"[\n" | b"[]\n" => true,
        [b'[', ..] => has_event,
        _ => false,
    };
    if !is_trace {
        return refused("another file");
    }
    // A link that takes the place of the file is not followed.
    std::fs::remove_file(path)?;
    create()
}

/// The number of bytes at the beginning of a file that are searched for an event of a trace.
const BEGINNING: u64 = 64 << 10;

impl TraceRecorder {
    /// Records into a new file, or one that replaces a trace: see [`create_trace`].
    ///
    /// # Errors
    ///
    /// When the file cannot be created, or is something other than a trace.
    pub fn create(file: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self::to(BufWriter::new(create_trace(file.as_ref())?)))
    }

    /// Records into a writer.
    #[must_use]
    pub fn to(out: impl Write + Send + 'static) -> Self {
        let state =
            State { out: Some(Box::new(out)), error: None, empty: true, ranks: HashMap::new() };
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(Arc::new(Shared { began: Instant::now(), epoch, state: Mutex::new(state) }))
    }

    /// Records a span of the caller's own, such as a step of training, until it is dropped.
    #[must_use = "the span ends when it is dropped"]
    pub fn span(&self, rank: Rank, name: &str) -> TraceSpan {
        let event = TraceEvent::span(rank, CALLER_ROW, crate::event::PHASE, name);
        self.name_row(rank, CALLER_ROW, "caller");
        TraceSpan { recorder: self.clone(), began: Instant::now(), event, row: None }
    }

    /// Ends the file. Later events are not recorded.
    ///
    /// # Errors
    ///
    /// The first error of a write.
    pub fn finish(&self) -> io::Result<()> {
        let mut state = self.0.state();
        if let Some(mut out) = state.out.take() {
            let end = if state.empty { "[]\n" } else { "\n]\n" };
            state.error = out.write_all(end.as_bytes()).and_then(|()| out.flush()).err();
        }
        state.error.take().map_or(Ok(()), Err)
    }

    /// Writes the events that are in memory, so that they survive the process.
    pub(crate) fn flush(&self) {
        let mut state = self.0.state();
        if let Some(out) = &mut state.out
            && let Err(error) = out.flush()
        {
            state.fail(error);
        }
    }

    /// Microseconds since 1970.
    pub(crate) fn micros(&self, at: Instant) -> f64 {
        (self.0.epoch + at.saturating_duration_since(self.0.began)).as_nanos() as f64 / 1e3
    }

    pub(crate) fn record(&self, event: &TraceEvent) {
        self.0.state().record(event);
    }

    /// Records the name of a fixed row once.
    pub(crate) fn name_row(&self, rank: Rank, row: u32, name: &str) {
        let mut state = self.0.state();
        state.greet(rank);
        let rows = state.ranks.entry(rank).or_default();
        if !rows.named.contains(&row) {
            rows.named.push(row);
            state.record(&TraceEvent::naming(rank, Some(row), name));
        }
    }

    /// A span in a row of its own among those of the rank's requests.
    pub(crate) fn request(&self, rank: Rank, category: &str, name: &str) -> TraceSpan {
        let mut state = self.0.state();
        state.greet(rank);
        let requests = &mut state.ranks.entry(rank).or_default().requests;
        let lane = requests.iter().position(|used| !used).unwrap_or(requests.len());
        let fresh = lane == requests.len();
        match requests.get_mut(lane) {
            Some(used) => *used = true,
            None => requests.push(true),
        }
        let row = FIRST_REQUEST_ROW.saturating_add(u32::try_from(lane).unwrap_or(u32::MAX));
        if fresh {
            state.record(&TraceEvent::naming(rank, Some(row), &format!("requests {}", lane + 1)));
        }
        drop(state);
        let event = TraceEvent::span(rank, row, category, name);
        TraceSpan { recorder: self.clone(), began: Instant::now(), event, row: Some(lane) }
    }
}

impl fmt::Debug for TraceRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceRecorder").finish_non_exhaustive()
    }
}

/// The row of [`TraceRecorder::span`].
pub(crate) const CALLER_ROW: u32 = 0;

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Names a rank before its first event.
    fn greet(&mut self, rank: Rank) {
        if let Entry::Vacant(fresh) = self.ranks.entry(rank) {
            fresh.insert(Rows::default());
            self.record(&TraceEvent::naming(rank, None, &format!("rank {rank}")));
        }
    }

    fn record(&mut self, event: &TraceEvent) {
        let Some(out) = &mut self.out else { return };
        let start = if self.empty { "[\n" } else { ",\n" };
        let written =
            out.write_all(start.as_bytes()).and_then(|()| Ok(serde_json::to_writer(out, event)?));
        self.empty = false;
        if let Err(error) = written {
            self.fail(error);
        }
    }

    fn fail(&mut self, error: io::Error) {
        tracing::warn!(%error, "the trace ends here: its file cannot be written");
        self.out = None;
        self.error = Some(error);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if let Some(mut out) = self.out.take() {
            let end = if self.empty { "[]\n" } else { "\n]\n" };
            if let Err(error) = out.write_all(end.as_bytes()).and_then(|()| out.flush()) {
                tracing::warn!(%error, "the trace has no end: its file cannot be written");
            }
        }
    }
}

/// A span that ends when it is dropped.
#[derive(Debug)]
pub struct TraceSpan {
    recorder: TraceRecorder,
    began: Instant,
    event: TraceEvent,
    /// The row of requests that it occupies.
    row: Option<usize>,
}

impl TraceSpan {
    pub(crate) fn set(&mut self, name: &str, value: impl Into<serde_json::Value>) {
        self.event.set(name, value);
    }

    pub(crate) fn with(mut self, name: &str, value: impl Into<serde_json::Value>) -> Self {
        self.set(name, value);
        self
    }
}

impl Drop for TraceSpan {
    fn drop(&mut self) {
        let now = Instant::now();
        self.event.micros = self.recorder.micros(self.began);
        self.event.micros_taken =
            Some(now.saturating_duration_since(self.began).as_nanos() as f64 / 1e3);
        let mut state = self.recorder.0.state();
        state.record(&self.event);
        let rows = state.ranks.get_mut(&self.event.rank);
        if let (Some(row), Some(rows)) = (self.row, rows)
            && let Some(used) = rows.requests.get_mut(row)
        {
            *used = false;
        }
    }
}
