//! A group's terminal error, and the form in which each rank returns it.
//!
//! A collective call involves all ranks, so one that fails on one rank cannot succeed on another, and no
//! rank can tell which messages of the failed call others have taken. So the first error of a group ends
//! the group: it is kept, sent to all, and returned by every later call, as a poisoned mutex is not
//! entered again. A new group is the way on. All ranks keep the same `Poison`; [`Poison::seen_by`] makes
//! each rank's error of it.

use std::time::Duration;

use dcp_core::{CollectiveError, Rank};
use serde::{Deserialize, Serialize};

use crate::call::{Call, Op, Passed};

/// The first thing that went wrong in a group. It stays; every later call returns it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Poison {
    Lost {
        rank: Rank,
        op: Op,
        message: String,
    },
    Timeout {
        rank: Rank,
        op: Op,
        deadline: Duration,
    },
    Aborted {
        rank: Rank,
        reason: String,
    },
    /// Two ranks made different calls at the same place of the sequence.
    Differ {
        one: (Rank, Call),
        other: (Rank, Call),
    },
    /// A rank broke a rule of all ranks.
    Wrong {
        rank: Rank,
        op: Op,
        message: String,
    },
}

impl Poison {
    /// Checks the root of a call, and the messages of `rank`, before the other ranks are involved.
    ///
    /// # Errors
    ///
    /// [`Poison::Wrong`] naming `rank`.
    pub(crate) fn check(
        call: Call,
        rank: Rank,
        world_size: u32,
        passed: Passed<'_>,
    ) -> Result<(), Self> {
        let wrong = |message| Self::Wrong { rank, op: call.op, message };
        call.check(rank, world_size, passed).map_err(wrong)
    }

    /// The error as `me` sees it: where two ranks disagree, each one names the other.
    pub(crate) fn seen_by(&self, me: Rank) -> CollectiveError {
        match self {
            Self::Lost { rank, op, message } => {
                CollectiveError::PeerLost { rank: *rank, op: op.name(), message: message.clone() }
            }
            Self::Timeout { rank, op, deadline } => {
                CollectiveError::Timeout { rank: *rank, op: op.name(), deadline: *deadline }
            }
            Self::Aborted { rank, reason } => {
                CollectiveError::Aborted { rank: *rank, reason: reason.clone() }
            }
            Self::Differ { one, other } => {
                let (mine, theirs) = if other.0 == me { (other, one) } else { (one, other) };
                let who =
                    if mine.0 == me { "this rank".to_owned() } else { format!("rank {}", mine.0) };
                CollectiveError::Mismatch {
                    rank: theirs.0,
                    op: mine.1.op.name(),
                    message: format!("it called {}, {who} called {}", theirs.1, mine.1),
                }
            }
            Self::Wrong { rank, op, message } => {
                CollectiveError::Mismatch { rank: *rank, op: op.name(), message: message.clone() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_two_ranks_that_differ_is_told_of_the_other() {
        let poison = Poison::Differ {
            one: (1, Call::new(Op::Barrier, 0)),
            other: (2, Call::new(Op::Gather, 3)),
        };
        assert_eq!(
            poison.seen_by(1).to_string(),
            "rank 2 is out of step in barrier: it called gather with root 3, this rank called \
             barrier"
        );
        assert_eq!(
            poison.seen_by(2).to_string(),
            "rank 1 is out of step in gather: it called barrier, this rank called gather with \
             root 3"
        );
        assert_eq!(
            poison.seen_by(0).to_string(),
            "rank 2 is out of step in barrier: it called gather with root 3, rank 1 called barrier"
        );
    }
}
