//! The report that `inspect` shows of a checkpoint with a file for each rank.

use serde::Serialize;

/// The facts of a checkpoint with a file for each rank, besides its tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RankFilesReport {
    /// The program that names files so.
    pub program: &'static str,
    /// The number of ranks.
    pub ranks: u32,
    /// The number of files.
    pub files: usize,
    /// The kinds of state, by the names that they have here.
    pub states: Vec<String>,
    /// Copies that differ between ranks; that of the lowest rank is taken.
    pub differing: Vec<String>,
    /// The number of values that are kept for each rank.
    pub by_rank: u64,
}
