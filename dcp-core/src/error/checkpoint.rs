//! What a save or load says, for all ranks together.

use std::fmt;

use super::{CollectiveError, FormatError, PlanError, Rank, StorageError};
use crate::memory::LoanError;
use crate::shown::{Message, Quoted};

/// The step of a save or load in which something failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// Looking at the storage, before anything else.
    Open,
    /// Making plans.
    Plan,
    /// Writing data.
    Write,
    /// Making the new checkpoint visible.
    Commit,
    /// Reading data.
    Read,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Plan => "plan",
            Self::Write => "write",
            Self::Commit => "commit",
            Self::Read => "read",
        })
    }
}

/// Why a checkpoint could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A file is not what it should be.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// There is no sound plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// There is no group, or it broke outside of any step.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The ranks lost each other in a save or load.
    #[error("the ranks lost each other {}{}", in_step(.phase), .standing)]
    Lost {
        /// The step in which this rank was.
        phase: Phase,
        /// What became of the checkpoint that was being saved, as far as this rank can tell.
        standing: Standing,
        /// Which rank was lost, and how that was noticed.
        #[source]
        source: CollectiveError,
    },
    /// A background save did not come to its end, or was not begun.
    #[error("background save: {problem}")]
    Background {
        /// What happened.
        problem: String,
    },
    /// What was asked for and what is stored do not agree.
    #[error("the checkpoint does not fit the state dict: {summary}", summary = Message(.summary))]
    Mismatch {
        /// The first few differences in words.
        summary: String,
    },
    /// Memory of a tensor cannot be used now.
    #[error("cannot use the memory of {fqn}", fqn = Quoted(.fqn))]
    Memory {
        /// The tensor.
        fqn: String,
        /// Why not.
        #[source]
        source: LoanError,
    },
    /// There is no checkpoint here.
    #[error("{message}", message = Message(.message))]
    NotACheckpoint {
        /// What there is instead, and where a checkpoint is if one is near.
        message: String,
    },
    /// Ranks failed; every rank of the group gets this same report.
    #[error("{phase} failed on {}", failing_ranks(.failures))]
    Ranks {
        /// The step.
        phase: Phase,
        /// Each failing rank and what it said.
        failures: Vec<RankFailure>,
    },
    /// The error of a plug-in, such as a format; [`downcast_ref`](std::error::Error) tells its type.
    #[error(transparent)]
    Plugin(Box<dyn std::error::Error + Send + Sync>),
    /// The caller asked to stop.
    #[error("canceled")]
    Canceled,
}

/// What a rank that lost its group knows of the checkpoint that was being saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Standing {
    /// Nothing was being saved.
    NoSave,
    /// It was not and will not be committed; what was there before stays.
    NotCommitted,
    /// The coordinator may have committed it, or may be doing so.
    MayBeCommitted,
    /// It is committed.
    Committed,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoSave => "",
            Self::NotCommitted => "; the checkpoint was not committed, what was there before stays",
            Self::MayBeCommitted => {
                "; the checkpoint may have been committed: look with `dcp inspect`"
            }
            Self::Committed => "; the checkpoint was committed",
        })
    }
}

fn in_step(phase: &Phase) -> &'static str {
    match phase {
        Phase::Open => "while opening",
        Phase::Plan => "while planning",
        Phase::Write => "while writing",
        Phase::Commit => "while committing",
        Phase::Read => "while reading",
    }
}

/// What one rank reported.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankFailure {
    /// The rank, as the group counts.
    pub rank: Rank,
    /// Its error, with the chain of causes.
    pub message: String,
}

impl RankFailure {
    /// `rank` failed with `message`.
    #[must_use]
    pub fn new(rank: Rank, message: impl Into<String>) -> Self {
        Self { rank, message: message.into() }
    }
}

fn failing_ranks(failures: &[RankFailure]) -> String {
    const SHOWN: usize = 8;
    let mut text = failures
        .iter()
        .take(SHOWN)
        .map(|failure| format!("rank {}: {}", failure.rank, Message(&failure.message)))
        .collect::<Vec<_>>();
    if failures.len() > SHOWN {
        text.push(format!("and {} more ranks", failures.len() - SHOWN));
    }
    text.join("; ")
}
