//! Errors of a group whose ranks lose each other.

use crate::names::rank::Rank;

/// Ranks cannot talk to each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A peer died, left, or closed its connection.
    #[error("rank {rank} is gone during {op}: {message}")]
    PeerLost {
        /// The peer.
        rank: Rank,
        /// The operation that this rank was in.
        op: &'static str,
        /// The sign of the loss, such as an error of the connection.
        message: String,
    },
    /// A peer did not answer in time.
    #[error("rank {rank} did not answer within {deadline:?} in {op}")]
    Timeout {
        /// The peer waited for.
        rank: Rank,
        /// The operation that this rank was in.
        op: &'static str,
        /// The deadline.
        deadline: std::time::Duration,
    },
    /// A rank is gone or late, and the transport does not say which one.
    #[error("a rank of the group is gone or late during {op}: {message}")]
    Unreachable {
        /// The operation that this rank was in.
        op: &'static str,
        /// The error of the transport.
        message: String,
    },
    /// A rank gave up and reported it to the others.
    #[error("rank {rank} aborted the group: {reason}")]
    Aborted {
        /// The rank that gave up.
        rank: Rank,
        /// The reason that it reported.
        reason: String,
    },
    /// Ranks are at different operations, or talk different versions.
    #[error("rank {rank} is out of step in {op}: {message}")]
    Mismatch {
        /// The peer.
        rank: Rank,
        /// The operation that this rank was in.
        op: &'static str,
        /// The operation or the message of the peer.
        message: String,
    },
    /// Rank 0 cannot listen for the other ranks.
    #[error("rank 0 cannot listen at {address}: {message}; set {variable} to {}", remedy(.variable))]
    CannotListen {
        /// The address that was tried.
        address: String,
        /// The reason, in words.
        message: String,
        /// The environment variable that names another place.
        variable: &'static str,
    },
    /// The group could not be formed.
    #[error("cannot form the group: {message}")]
    Rendezvous {
        /// The problem, and the settings to check.
        message: String,
    },
}

impl CollectiveError {
    /// The rank that failed or is gone, if the error is that of one.
    #[must_use]
    pub fn rank(&self) -> Option<Rank> {
        match self {
            Self::PeerLost { rank, .. }
            | Self::Timeout { rank, .. }
            | Self::Aborted { rank, .. }
            | Self::Mismatch { rank, .. } => Some(*rank),
            Self::CannotListen { .. } => Some(0),
            Self::Unreachable { .. } | Self::Rendezvous { .. } => None,
        }
    }

    /// Whether the operation may succeed in a new group: a rank died or was late. This group
    /// refuses every later call. A rank that aborted, that is out of step or that did not join has
    /// a cause of its own, which a retry does not remove.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::PeerLost { .. } | Self::Timeout { .. } | Self::Unreachable { .. })
    }
}

fn remedy(variable: &str) -> &'static str {
    match variable {
        "DCP_BIND_ADDR" => "an address of its host",
        _ => "a free port, the same on all ranks",
    }
}
