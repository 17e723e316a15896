//! How the ranks of a group talk.

use std::fmt;

use bytes::Bytes;

use crate::error::{CollectiveError, Rank};

/// A group of ranks that exchange byte messages.
///
/// Calls block; the engine gives each group a thread of its own, because NCCL, MPI and sockets
/// block too. Every rank of the group must call the same operations in the same order; an
/// implementation notices when they do not ([`CollectiveError::Mismatch`]). No call waits longer
/// than the implementation's deadline: when a rank dies or stays silent, every other rank gets an
/// error that names it. After any error the group is poisoned and every later call fails.
///
/// Ranks count within the group, from 0. All of `0..world_size` may be the root.
pub trait Collective: fmt::Debug + Send + Sync {
    /// This process in the group.
    fn rank(&self) -> Rank;

    /// The number of ranks in the group; at least 1.
    fn world_size(&self) -> u32;

    /// Brings every rank's message to `root`, which gets them in rank order; the others get
    /// `None`.
    ///
    /// # Errors
    ///
    /// When a rank is lost, late, out of step, or aborted the group.
    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError>;

    /// Hands each rank its message from `root`, which passes one message per rank; the others
    /// pass `None`.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError>;

    /// Hands every rank the message of `root`; the others pass `None`.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError>;

    /// Brings every rank's message to every rank, in rank order.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError>;

    /// Waits until every rank is here.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn barrier(&self) -> Result<(), CollectiveError>;

    /// Poisons the group: this rank gives up, and every other rank's present or next call returns
    /// [`CollectiveError::Aborted`] with its rank and `reason`. Does not block for the peers.
    fn abort(&self, reason: &str);
}
