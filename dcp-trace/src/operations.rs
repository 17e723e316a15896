//! Phases of saves and loads, from the events of an observer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp_core::Rank;
use dcp_engine::event::Operation;
use dcp_engine::{CheckpointEvent, CheckpointObserver};

use crate::event::{PHASE, TraceEvent};
use crate::recorder::TraceRecorder;

/// The rows of phases: saves and loads of one rank may overlap, and so may the copy of the next
/// state and the write of the last.
const SAVE_ROW: u32 = 1;
pub(crate) const LOAD_ROW: u32 = 2;
const STAGE_ROW: u32 = 3;

impl TraceRecorder {
    /// The observer that records the phases of saves and loads, for
    /// [`Settings::observer`](dcp_engine::Settings::observer).
    #[must_use]
    pub fn observer(&self) -> Arc<dyn CheckpointObserver> {
        Arc::new(RankOperations::new(self.clone()))
    }
}

/// Records the events of the saves and loads of any ranks.
#[derive(Debug)]
pub(crate) struct RankOperations {
    recorder: TraceRecorder,
    /// The saves and loads that are under way, and the numbers of the next.
    ranks: Mutex<HashMap<(Rank, Operation), Current>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Current {
    began: Option<Instant>,
    number: u64,
    bytes: u64,
}

impl RankOperations {
    pub(crate) fn new(recorder: TraceRecorder) -> Self {
        Self { recorder, ranks: Mutex::default() }
    }

    fn with<T>(&self, rank: Rank, of: Operation, with: impl FnOnce(&mut Current) -> T) -> T {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        with(ranks.entry((rank, of)).or_default())
    }

    /// Records a phase that began `since` before now.
    fn phase(&self, event: TraceEvent, end: Instant, duration: Duration) {
        let began = end.checked_sub(duration).unwrap_or(end);
        self.recorder.record(&TraceEvent {
            micros: self.recorder.micros(began),
            micros_taken: Some(duration.as_nanos() as f64 / 1e3),
            ..event
        });
    }

    /// Records the whole operation, and counts it.
    fn end(&self, rank: Rank, operation: Operation, error: Option<&str>) {
        let now = Instant::now();
        let ended = self.with(rank, operation, |current| {
            let ended = *current;
            *current = Current { number: ended.number + 1, ..Current::default() };
            ended
        });
        let (row, name) = row(operation);
        let mut event = TraceEvent::span(rank, row, PHASE, name)
            .with("number", ended.number)
            .with("bytes", ended.bytes);
        if let Some(error) = error {
            event = event.with("error", error);
        }
        let began = ended.began.unwrap_or(now);
        self.phase(event, now, now.saturating_duration_since(began));
        self.recorder.flush();
    }
}

/// The row and the name of an operation.
fn row(operation: Operation) -> (u32, &'static str) {
    match operation {
        Operation::Load => (LOAD_ROW, "load"),
        _ => (SAVE_ROW, "save"),
    }
}

impl CheckpointObserver for RankOperations {
    fn observe(&self, rank: Rank, event: &CheckpointEvent) {
        let now = Instant::now();
        let span = |row, name: &str, of| {
            let number = self.with(rank, of, |current| current.number);
            TraceEvent::span(rank, row, PHASE, name).with("number", number)
        };
        match event {
            CheckpointEvent::Staged { duration } => {
                self.recorder.name_row(rank, STAGE_ROW, "stage");
                self.phase(span(STAGE_ROW, "stage", Operation::Save), now, *duration);
            }
            CheckpointEvent::Planned { operation, items, bytes, reused, duration } => {
                let (row, name) = row(*operation);
                self.recorder.name_row(rank, row, name);
                self.with(rank, *operation, |current| {
                    current.began = now.checked_sub(*duration);
                    current.bytes = *bytes;
                });
                let event = span(row, "plan", *operation)
                    .with("items", *items)
                    .with("bytes", *bytes)
                    .with("reused", *reused);
                self.phase(event, now, *duration);
            }
            CheckpointEvent::Written { bytes, duration, all_ranks } => {
                let wait = all_ranks.saturating_sub(*duration);
                let wrote = now.checked_sub(wait).unwrap_or(now);
                self.with(rank, Operation::Save, |current| current.bytes = *bytes);
                let event = span(SAVE_ROW, "write", Operation::Save).with("bytes", *bytes);
                self.phase(event, wrote, *duration);
                self.phase(span(SAVE_ROW, "wait", Operation::Save), now, wait);
            }
            CheckpointEvent::Committed { duration } => {
                self.phase(span(SAVE_ROW, "commit", Operation::Save), now, *duration);
                self.end(rank, Operation::Save, None);
            }
            CheckpointEvent::Read { bytes_needed, bytes_read, duration, all_ranks } => {
                let wait = all_ranks.saturating_sub(*duration);
                let done = now.checked_sub(wait).unwrap_or(now);
                self.with(rank, Operation::Load, |current| current.bytes = *bytes_needed);
                let event = span(LOAD_ROW, "read", Operation::Load)
                    .with("bytes", *bytes_needed)
                    .with("bytes_read", *bytes_read);
                self.phase(event, done, *duration);
                self.phase(span(LOAD_ROW, "wait", Operation::Load), now, wait);
                self.end(rank, Operation::Load, None);
            }
            CheckpointEvent::Failed { operation, error } => {
                let (row, name) = row(*operation);
                self.recorder.name_row(rank, row, name);
                self.end(rank, *operation, Some(error));
            }
            // Requests show the progress in more detail.
            _ => {}
        }
    }
}
