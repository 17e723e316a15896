//! The outcome of a save.

use std::sync::Arc;
use std::time::Duration;

use dcp_cast::{CastCounts, CastReport};
use dcp_core::checkpoint::WriteReport;
use dcp_core::plan::GlobalPlan;
use dcp_core::{CheckpointMetadata, Rank};
use serde::{Deserialize, Serialize};

/// The outcome of a save: the same on every rank, except the metadata, the timings, and what was cast.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SaveSummary {
    /// Tensors and objects in the checkpoint.
    pub entries: u64,
    /// Bytes that all ranks wrote to data files.
    pub bytes_written: u64,
    /// Data files of all ranks.
    pub files: u64,
    /// Whether the save reused the plan of an earlier one.
    pub reused_plan: bool,
    /// The duration of each step on this rank.
    pub timings: SaveTimings,
    /// The durations of the ranks' writes.
    pub write_times: WriteTimes,
    /// The result of [`Settings::cast`](crate::Settings::cast) for the tensors of which this rank wrote anything.
    pub cast: CastReport,
    /// The counts of the casts of all ranks together.
    pub cast_total: CastCounts,
    /// Values that ranks have under one name and that differ, by name: the checkpoint holds that of one rank.
    /// Objects and whole tensors in host memory of at most 64 KiB are compared, 1024 of each rank, and at most
    /// 16 are listed. State that differs by rank is saved under a name with the rank, such as `rng/rank_3`.
    pub differing: Vec<DifferingValue>,
    pub(crate) plan: Option<Arc<GlobalPlan>>,
}

impl SaveSummary {
    /// The index of the new checkpoint; on the coordinator only.
    #[must_use]
    pub fn metadata(&self) -> Option<&CheckpointMetadata> {
        self.plan.as_ref().map(|plan| &plan.metadata)
    }
}

/// A value that is not the same on all ranks that have its name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DifferingValue {
    /// Its name in the checkpoint.
    pub fqn: String,
    /// The ranks whose value is another one than that of the first rank which has it; at most 16.
    pub ranks: Vec<Rank>,
}

/// The duration of each step of a save on one rank, with the wait for other ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveTimings {
    /// Flattening the state and encoding its objects.
    pub prepare: Duration,
    /// Agreeing on a plan.
    pub plan: Duration,
    /// Writing the items, until all ranks have written theirs.
    pub write: Duration,
    /// Making the checkpoint visible.
    pub commit: Duration,
}

/// The durations of the ranks' writes in a save, each without the wait for the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WriteTimes {
    /// The rank that wrote longest.
    pub slowest_rank: Rank,
    /// The duration of its write.
    pub slowest: Duration,
    /// Bytes that it wrote.
    pub slowest_bytes: u64,
    /// The mean of all ranks.
    pub mean: Duration,
    /// The file of any rank that took longest, if the format's writer measures files.
    pub slowest_file: Option<FileTime>,
}

/// The duration of one data file's write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FileTime {
    /// The rank that wrote it.
    pub rank: Rank,
    /// Its key in the storage.
    pub file: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// The duration from its first byte until it was durable.
    pub duration: Duration,
}

impl FileTime {
    /// The file of a rank's report that took longest; the rank is set by the coordinator.
    pub(crate) fn slowest(report: &WriteReport) -> Option<Self> {
        let timed = report.files.iter().filter_map(|(key, bytes)| {
            let duration = *report.durations.get(key)?;
            Some(Self { rank: 0, file: key.to_string(), bytes: *bytes, duration })
        });
        timed.max_by_key(|file| file.duration)
    }
}

impl WriteTimes {
    /// Summarizes the durations and bytes of all ranks, and the slowest file of each, in rank order.
    pub(crate) fn of(
        ranks: impl Iterator<Item = (Duration, u64)> + Clone,
        files: impl Iterator<Item = Option<FileTime>>,
    ) -> Self {
        let files = (0..).zip(files);
        let files = files.filter_map(|(rank, file)| file.map(|file| FileTime { rank, ..file }));
        let slowest_file = files.max_by_key(|file| file.duration);
        let slowest =
            (0..).zip(ranks.clone()).max_by_key(|(rank, (time, _))| (*time, u32::MAX - rank));
        let Some((slowest_rank, (slowest, slowest_bytes))) = slowest else {
            return Self::default();
        };
        let (sum, count) = ranks.fold((Duration::ZERO, 0_u32), |(sum, count), (time, _)| {
            (sum.saturating_add(time), count + 1)
        });
        let mean = sum / count.max(1);
        Self { slowest_rank, slowest, slowest_bytes, mean, slowest_file }
    }

    /// The slowest rank's duration, by the mean: 1 if all ranks wrote equally long.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        if self.mean.is_zero() { 1.0 } else { self.slowest.as_secs_f64() / self.mean.as_secs_f64() }
    }
}
