//! The summary of a trace: the slowest ranks, files and requests.

use std::collections::BTreeMap;

use dcp_core::Rank;
use serde::Serialize;

use crate::event::{FILE, PHASE, REQUEST, TraceEvent};
use crate::file::Trace;
use crate::operations::LOAD_ROW;
use crate::recorder::CALLER_ROW;

/// A summary of a trace. Times are in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct TraceSummary {
    /// The ranks with events.
    pub ranks: Vec<Rank>,
    /// Saves and loads, in the order of their begin.
    pub operations: Vec<OperationSummary>,
    /// Files, the slowest first: for each rank, those that it wrote and those that it read.
    pub files: Vec<FileSummary>,
    /// Requests to the storage by name, those that took longest in all first.
    pub requests: Vec<RequestSummary>,
    /// Whether a file of the trace ends within an event.
    pub is_cut: bool,
}

/// A save or load of all ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct OperationSummary {
    /// `save`, `load`, or the name of a span of the caller's own.
    pub name: String,
    /// Its number on each rank, from 0.
    pub number: u64,
    /// The time at which the first rank began, since 1970.
    pub began: f64,
    /// The time from there until the last rank ended.
    pub duration: f64,
    /// Bytes that all ranks wrote or needed.
    pub bytes: u64,
    /// The rank that wrote or read longest, without its wait for others.
    pub slowest_rank: Rank,
    /// The duration of the slowest rank by the mean of all.
    pub imbalance: f64,
    /// Each rank, in rank order.
    pub ranks: Vec<RankSummary>,
}

/// A save or load on one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RankSummary {
    /// The rank.
    pub rank: Rank,
    /// The time of its begin, since 1970.
    pub began: f64,
    /// The time until it ended.
    pub duration: f64,
    /// Bytes that it wrote or needed.
    pub bytes: u64,
    /// The time that it wrote or read, without its wait for others.
    pub work: f64,
    /// Its phases, in the order of time.
    pub phases: Vec<PhaseSummary>,
    /// The error, if it failed.
    pub error: Option<String>,
}

/// A phase of a save or load on one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PhaseSummary {
    /// `stage`, `plan`, `write`, `read`, `wait` or `commit`.
    pub name: String,
    /// The time of its begin, since 1970.
    pub began: f64,
    /// Its duration.
    pub duration: f64,
}

/// A file that a rank wrote or read.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct FileSummary {
    /// Its key in the storage.
    pub file: String,
    /// The rank.
    pub rank: Rank,
    /// Whether the rank wrote it.
    pub written: bool,
    /// Bytes of all requests.
    pub bytes: u64,
    /// From the begin of the first request to the end of the last.
    pub duration: f64,
}

/// The requests of one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RequestSummary {
    /// The name, such as `read` or `put part`.
    pub name: String,
    /// The number of requests.
    pub count: u64,
    /// The number of requests that failed or were canceled.
    pub failed: u64,
    /// Bytes of all.
    pub bytes: u64,
    /// The sum of their durations.
    pub total: f64,
    /// The median.
    pub median: f64,
    /// 99 of 100 took at most this long.
    pub p99: f64,
    /// The longest.
    pub longest: f64,
}

impl TraceSummary {
    /// Summarizes a trace.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let mut ranks: Vec<_> = trace.events.iter().map(|event| event.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        Self {
            ranks,
            operations: operations(trace),
            files: files(trace),
            requests: requests(trace),
            is_cut: trace.is_cut,
        }
    }
}

/// The first begin and the last end of spans.
#[derive(Clone, Copy, Debug)]
struct Extent {
    began: f64,
    ended: f64,
}

impl Extent {
    fn of<'a>(spans: impl IntoIterator<Item = &'a TraceEvent>) -> Self {
        let none = Self { began: f64::INFINITY, ended: f64::NEG_INFINITY };
        let extent =
            spans.into_iter().filter(|span| span.micros.is_finite()).fold(none, Self::with);
        if extent.began.is_finite() { extent } else { Self { began: 0.0, ended: 0.0 } }
    }

    fn with(self, span: &TraceEvent) -> Self {
        let ended = span.micros + span.duration();
        Self { began: self.began.min(span.micros), ended: self.ended.max(ended) }
    }

    fn duration(self) -> f64 {
        self.ended - self.began
    }
}

/// The operation that a phase is a part of.
fn operation_of(phase: &TraceEvent) -> Option<(&str, u64)> {
    if phase.row == CALLER_ROW {
        return Some((&phase.name, 0));
    }
    let number = phase.number("number")?;
    match (phase.name.as_str(), phase.row) {
        // Saves and loads have phases of these names.
        ("plan" | "wait", LOAD_ROW) | ("load" | "read", _) => Some(("load", number)),
        ("plan" | "wait" | "save" | "write" | "commit" | "stage", _) => Some(("save", number)),
        _ => None,
    }
}

fn operations(trace: &Trace) -> Vec<OperationSummary> {
    type ByRank<'a> = BTreeMap<Rank, Vec<&'a TraceEvent>>;
    let mut all = BTreeMap::<(&str, u64), ByRank<'_>>::new();
    for event in trace.events.iter().filter(|event| event.is_span(PHASE)) {
        if let Some(operation) = operation_of(event) {
            all.entry(operation).or_default().entry(event.rank).or_default().push(event);
        }
    }
    let summary = |((name, number), ranks): ((&str, u64), ByRank<'_>)| {
        let extent = Extent::of(ranks.values().flatten().copied());
        let ranks = ranks.into_iter().map(|(rank, spans)| one_rank(name, rank, spans));
        let ranks: Vec<_> = ranks.collect();
        let slowest = ranks.iter().rev().max_by(|left, right| left.work.total_cmp(&right.work));
        let mean = ranks.iter().map(|rank| rank.work).sum::<f64>() / ranks.len().max(1) as f64;
        let longest = slowest.map_or(0.0, |rank| rank.work);
        OperationSummary {
            name: name.to_owned(),
            number,
            began: extent.began,
            duration: extent.duration(),
            bytes: ranks.iter().fold(0, |sum, rank| sum.saturating_add(rank.bytes)),
            slowest_rank: slowest.map_or(0, |rank| rank.rank),
            imbalance: if mean > 0.0 { longest / mean } else { 1.0 },
            ranks,
        }
    };
    let mut operations: Vec<_> = all.into_iter().map(summary).collect();
    operations.sort_by(|left, right| left.began.total_cmp(&right.began));
    operations
}

fn one_rank(name: &str, rank: Rank, mut spans: Vec<&TraceEvent>) -> RankSummary {
    spans.sort_by(|left, right| left.micros.total_cmp(&right.micros));
    let extent = Extent::of(spans.iter().copied());
    let whole = spans.iter().find(|span| span.name == name);
    let phases = spans.iter().filter(|span| span.name != name);
    let work = phases.clone().filter(|span| matches!(span.name.as_str(), "write" | "read"));
    RankSummary {
        rank,
        began: extent.began,
        duration: extent.duration(),
        bytes: whole.and_then(|span| span.number("bytes")).unwrap_or(0),
        work: work.fold(0.0, |sum, span| sum + span.duration()),
        phases: phases
            .map(|span| PhaseSummary {
                name: span.name.clone(),
                began: span.micros,
                duration: span.duration(),
            })
            .collect(),
        error: whole.and_then(|span| span.text("error")).map(str::to_owned),
    }
}

fn files(trace: &Trace) -> Vec<FileSummary> {
    let mut files = BTreeMap::<(&str, Rank, bool), Vec<&TraceEvent>>::new();
    for event in &trace.events {
        let written = match event.name.as_str() {
            _ if event.is_span(FILE) => true,
            "put" | "replace" if event.is_span(REQUEST) => true,
            "read" | "read whole" if event.is_span(REQUEST) => false,
            _ => continue,
        };
        if let Some(file) = event.text("file") {
            files.entry((file, event.rank, written)).or_default().push(event);
        }
    }
    let summary = |((file, rank, written), spans): ((&str, Rank, bool), Vec<&TraceEvent>)| {
        let bytes = spans.iter().filter_map(|span| span.number("bytes"));
        FileSummary {
            file: file.to_owned(),
            rank,
            written,
            bytes: bytes.fold(0, u64::saturating_add),
            duration: Extent::of(spans).duration(),
        }
    };
    let mut files: Vec<_> = files.into_iter().map(summary).collect();
    files.sort_by(|left, right| right.duration.total_cmp(&left.duration));
    files
}

fn requests(trace: &Trace) -> Vec<RequestSummary> {
    let mut names = BTreeMap::<&str, Vec<&TraceEvent>>::new();
    for event in trace.events.iter().filter(|event| event.is_span(REQUEST)) {
        names.entry(&event.name).or_default().push(event);
    }
    let summary = |(name, spans): (&str, Vec<&TraceEvent>)| {
        let mut times: Vec<_> = spans.iter().map(|span| span.duration()).collect();
        times.sort_by(f64::total_cmp);
        let at = |share: usize| times.get((times.len() * share).div_ceil(100).max(1) - 1);
        let bytes = spans.iter().filter_map(|span| span.number("bytes"));
        RequestSummary {
            name: name.to_owned(),
            count: spans.len() as u64,
            failed: spans.iter().filter(|span| span.text("outcome") != Some("ok")).count() as u64,
            bytes: bytes.fold(0, u64::saturating_add),
            total: times.iter().fold(0.0, |sum, time| sum + time),
            median: at(50).copied().unwrap_or(0.0),
            p99: at(99).copied().unwrap_or(0.0),
            longest: times.last().copied().unwrap_or(0.0),
        }
    };
    let mut requests: Vec<_> = names.into_iter().map(summary).collect();
    requests.sort_by(|left, right| right.total.total_cmp(&left.total));
    requests
}
