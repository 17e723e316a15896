//! Errors of a save or load, of one rank or of all ranks together.

use std::fmt;

use super::kind::{kind_of_group, kind_of_plan};
use super::{
    CollectiveError, FailureKind, FormatError, PlanError, StorageError, TensorError, error_chain,
};
use crate::names::rank::Rank;
use crate::tensors::device::DeviceError;
use crate::tensors::memory::LoanError;
use crate::tensors::region::RegionError;
use crate::text::{Message, Quoted};

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

/// An error of a save or load.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A file does not have the form of its format.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// There is no sound plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// There is no group, or it broke outside of any step.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The group of ranks broke in a save or load.
    #[error("the group of ranks broke {}{}", in_step(.phase), .standing)]
    Lost {
        /// The step in which this rank was.
        phase: Phase,
        /// The state of the checkpoint that was being saved, as seen by this rank.
        standing: Standing,
        /// The rank that was lost, and the sign of that.
        #[source]
        source: CollectiveError,
    },
    /// A background save did not finish, or was not started.
    #[error("background save: {problem}")]
    Background {
        /// The cause, in words.
        problem: String,
        /// The error of the save, where there is one.
        #[source]
        source: Option<Box<CheckpointError>>,
    },
    /// The state dict and the checkpoint do not fit together.
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
        /// The reason: the conflict with another loan of the memory.
        #[source]
        source: LoanError,
    },
    /// A tensor cannot be copied from or to its device.
    #[error("cannot copy {fqn} {}", direction(.device, *.saving), fqn = Quoted(.fqn))]
    Device {
        /// The tensor.
        fqn: String,
        /// The device, as it calls itself.
        device: String,
        /// Whether the copy was from the device, not to it.
        saving: bool,
        /// The device's error.
        #[source]
        source: DeviceError,
    },
    /// The checkpoint of a step could not be saved.
    #[error("cannot save step {step} to {url}", url = Quoted(.url))]
    Step {
        /// The training step.
        step: u64,
        /// The URL of the new checkpoint, without secrets.
        url: String,
        /// The error of the save.
        #[source]
        source: Box<CheckpointError>,
    },
    /// The coordinator does not see a file that another rank wrote.
    #[error(
        "{file} that rank {rank} wrote is not in {place} as rank {coordinator} sees it; save to a storage that \
         all ranks share: a local disk is of one machine, and memory:// of one process",
        file = Quoted(.file),
        place = called(.place.as_deref())
    )]
    NotShared {
        /// The file, by its key in the storage.
        file: String,
        /// The rank that wrote it.
        rank: Rank,
        /// The coordinator.
        coordinator: Rank,
        /// The name of the place, such as its URL.
        place: Option<String>,
        /// The error of the coordinator's storage.
        #[source]
        source: StorageError,
    },
    /// There is no checkpoint here.
    #[error("{message}", message = Message(.message))]
    NotACheckpoint {
        /// The contents of the place, and the place of a checkpoint if one is near.
        message: String,
    },
    /// Ranks failed; every rank of the group gets this same report.
    #[error("{phase} failed on {}", failing_ranks(.failures))]
    Ranks {
        /// The step.
        phase: Phase,
        /// The failure of each rank that failed.
        failures: Vec<RankFailure>,
    },
    /// The error of a plug-in, such as a format; [`downcast_ref`](std::error::Error) has its type.
    #[error(transparent)]
    Plugin(Box<dyn std::error::Error + Send + Sync>),
    /// A failure of the application itself, such as of a [`Stateful`](crate::Stateful) value;
    /// [`application`](Self::application) makes it of any error.
    #[error(transparent)]
    Application {
        /// The application's error; [`downcast_ref`](std::error::Error) has its type.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller canceled the operation.
    #[error("canceled")]
    Canceled,
}

impl CheckpointError {
    /// An application's own failure: its error, or a message.
    ///
    /// ```
    /// use dcp_core::CheckpointError;
    ///
    /// let error = CheckpointError::application("the scheduler has no state before its first step");
    /// assert!(matches!(error, CheckpointError::Application { .. }));
    /// ```
    #[must_use]
    pub fn application(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Application { source: error.into() }
    }

    /// The kind of failure, for a program to act on. Of several ranks, it is the first kind
    /// that is not [retryable](FailureKind::is_retryable), or the first.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Storage(error) => FailureKind::Storage(error.kind()),
            Self::Format(_) => FailureKind::Damaged,
            Self::Plan(error) => kind_of_plan(error),
            Self::Collective(source) | Self::Lost { source, .. } => kind_of_group(source),
            Self::Background { source, .. } => {
                source.as_ref().map_or(FailureKind::Other, |source| source.kind())
            }
            Self::Step { source, .. } => source.kind(),
            Self::NotShared { source, .. } => FailureKind::Storage(source.kind()),
            Self::Mismatch { .. } => FailureKind::Mismatch,
            Self::Memory { .. } => FailureKind::MemoryInUse,
            Self::Device { source, .. } => FailureKind::of(&**source),
            Self::NotACheckpoint { .. } => FailureKind::NotACheckpoint,
            Self::Ranks { failures, .. } => {
                let stops = failures.iter().find(|failure| !failure.kind.is_retryable());
                stops.or(failures.first()).map_or(FailureKind::Other, |failure| failure.kind)
            }
            Self::Plugin(error) | Self::Application { source: error } => FailureKind::of(&**error),
            Self::Canceled => FailureKind::Canceled,
        }
    }

    /// Whether the same call may succeed when it is repeated: as its [`kind`](Self::kind) says, so
    /// of several ranks only when all of them failed retryably.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.kind().is_retryable()
    }
}

impl From<TensorError> for CheckpointError {
    fn from(error: TensorError) -> Self {
        Self::Plan(error.into())
    }
}

impl From<RegionError> for CheckpointError {
    fn from(error: RegionError) -> Self {
        Self::Plan(error.into())
    }
}

/// The state of the checkpoint that was being saved, on a rank that lost its group.
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
                "; the checkpoint may have been committed: look with `Checkpoint::inspect`"
            }
            Self::Committed => "; the checkpoint was committed",
        })
    }
}

fn called(place: Option<&str>) -> String {
    place.map_or_else(|| "the storage".to_owned(), |place| Quoted(place).to_string())
}

fn direction(device: &str, saving: bool) -> String {
    format!("{} {}", if saving { "from" } else { "to" }, Message(device))
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

/// The failure that one rank reported.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankFailure {
    /// The rank, as the group counts.
    pub rank: Rank,
    /// The kind of failure on that rank.
    pub kind: FailureKind,
    /// Its error, with the chain of causes.
    pub message: String,
}

impl RankFailure {
    /// `rank` failed with `message`.
    #[must_use]
    pub fn new(rank: Rank, kind: FailureKind, message: impl Into<String>) -> Self {
        Self { rank, kind, message: message.into() }
    }

    /// `rank` failed with `error`, whose kind and message go to the other ranks.
    #[must_use]
    pub fn of(rank: Rank, error: &(dyn std::error::Error + 'static)) -> Self {
        Self::new(rank, FailureKind::of(error), error_chain(error))
    }

    /// Rank, [`FailureKind::name`] and message, as they are sent to other ranks.
    #[must_use]
    pub fn into_parts(self) -> (Rank, String, String) {
        (self.rank, self.kind.name().to_owned(), self.message)
    }

    /// The failure of which [`into_parts`](Self::into_parts) gave these.
    #[must_use]
    pub fn from_parts((rank, kind, message): (Rank, String, String)) -> Self {
        Self { rank, kind: FailureKind::from_name(&kind), message }
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
