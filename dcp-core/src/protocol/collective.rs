//! Communication between the ranks of a group.

use std::fmt;

use bytes::Bytes;

use crate::error::CollectiveError;
use crate::names::rank::Rank;

/// A group of ranks that exchange byte messages.
///
/// Calls block; the engine gives each group its own thread, because NCCL, MPI and sockets block
/// too. Every rank of the group calls the same operations in the same order; an implementation
/// detects a violation ([`CollectiveError::Mismatch`]). No call waits longer than the
/// implementation's deadline: when a rank dies or stalls, every other rank gets an error that names
/// it. After any error the group is poisoned, and every later call fails.
///
/// Ranks are numbered within the group, from 0. Any rank can be the root.
pub trait Collective: fmt::Debug + Send + Sync {
    /// This process's rank.
    fn rank(&self) -> Rank;

    /// The number of ranks in the group; at least 1.
    fn world_size(&self) -> u32;

    /// Sends every rank's message to `root`, which receives them in rank order; others receive
    /// `None`.
    ///
    /// # Errors
    ///
    /// When a rank is lost, late, out of step, or aborted the group.
    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError>;

    /// Sends each rank its message from `root`, which passes one message per rank; others pass
    /// `None`.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError>;

    /// Sends the message of `root` to every rank; others pass `None`.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError>;

    /// Sends every rank's message to every rank, in rank order.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError>;

    /// Waits until every rank has called it.
    ///
    /// # Errors
    ///
    /// As [`gather`](Self::gather).
    fn barrier(&self) -> Result<(), CollectiveError>;

    /// Poisons the group: every other rank's current or next call returns
    /// [`CollectiveError::Aborted`] with this rank and `reason`. Does not wait for other ranks.
    fn abort(&self, reason: &str);
}
