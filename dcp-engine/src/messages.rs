//! Messages between the ranks of a save.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_cast::CastCounts;
use dcp_core::checkpoint::WriteReport;
use dcp_core::{Key, PlanError, Rank, StorageError};
use serde::{Deserialize, Serialize};

use crate::summary::{FileTime, WriteTimes};

/// The first message of a rank to the coordinator: its structure, and the plan that it remembers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// Which save of its saver this is.
    pub(crate) sequence: u64,
    pub(crate) fingerprint: (u64, u64),
    pub(crate) remembers: Option<u64>,
}

/// The answer of the coordinator.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Decision {
    /// Every rank repeats its last write plan, under the names of this generation.
    Repeat { generation: u64 },
    /// Every rank sends its plan, which becomes a part of this one.
    Plan { plan_id: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Totals {
    pub(crate) entries: u64,
    pub(crate) bytes_written: u64,
    pub(crate) files: u64,
    pub(crate) reused_plan: bool,
    pub(crate) write_times: WriteTimes,
    pub(crate) cast: CastCounts,
}

/// What a rank wrote, and how long it took.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RankReport {
    pub(crate) lines: Vec<Line>,
    pub(crate) cast: CastCounts,
    pub(crate) duration: Duration,
    pub(crate) slowest_file: Option<FileTime>,
}

impl RankReport {
    pub(crate) fn new(report: &WriteReport, cast: CastCounts, duration: Duration) -> Self {
        Self { lines: lines(report), cast, duration, slowest_file: FileTime::slowest(report) }
    }

    /// Bytes in data files.
    pub(crate) fn bytes(&self) -> u64 {
        self.lines.iter().map(|(_, len, ..)| len).sum()
    }
}

/// A hash of everything that a plan depends on.
pub(crate) fn plan_id(key: &[u128]) -> u64 {
    key.iter().flat_map(|part| part.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Refuses to mix saves: ranks whose calls got out of step would write parts of different ones.
pub(crate) fn same_save(offers: &[Offer]) -> Result<(), PlanError> {
    let first = offers.first().map_or(0, |offer| offer.sequence);
    let Some(rank) = offers.iter().position(|offer| offer.sequence != first) else { return Ok(()) };
    let numbered = |offer: &Offer| format!("save number {}", offer.sequence + 1);
    Err(PlanError::Disagreement {
        fqn: "the whole state".into(),
        left: numbered(&offers[0]),
        left_rank: 0,
        right: numbered(&offers[rank]),
        right_rank: Rank::try_from(rank).unwrap_or(Rank::MAX),
    })
}

/// A file of a report as it travels: its name, its length, its SHA-256 where there is one, and the
/// CRC-32s of its chunks by their offset.
pub(crate) type Line = (String, u64, Option<[u8; 32]>, Vec<(u64, u32)>);

fn lines(report: &WriteReport) -> Vec<Line> {
    let line = |(key, len): &(Key, u64)| {
        let checksums = report.checksums.get(key).cloned().unwrap_or_default();
        (key.to_string(), *len, report.sha256.get(key).copied(), checksums)
    };
    report.files.iter().map(line).collect()
}

pub(crate) fn report(lines: Vec<Line>) -> Result<WriteReport, StorageError> {
    let (mut files, mut sha256) = (Vec::with_capacity(lines.len()), BTreeMap::new());
    let mut all_checksums = BTreeMap::new();
    for (name, len, digest, checksums) in lines {
        let key = Key::new(name)?;
        if !checksums.is_empty() {
            all_checksums.insert(key.clone(), checksums);
        }
        sha256.extend(digest.map(|digest| (key.clone(), digest)));
        files.push((key, len));
    }
    Ok(WriteReport::new(files).with_sha256(sha256).with_checksums(all_checksums))
}
