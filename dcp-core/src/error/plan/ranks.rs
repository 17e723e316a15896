//! Problems of ranks that should agree.

use std::fmt;

use super::PlanError;
use crate::names::rank::Rank;
use crate::text::{Message, Quoted};

/// Ranks do not agree. Whoever starts them gives all of them one program, one version and the same
/// settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RanksProblem {
    /// Ranks describe one thing differently.
    #[error("{subject} is {left} on rank {left_rank} but {right} on rank {right_rank}", left = Message(.left), right = Message(.right))]
    Disagreement {
        /// The thing.
        subject: PlanSubject,
        /// The description by one rank.
        left: String,
        /// The rank that says it.
        left_rank: Rank,
        /// The description by another rank.
        right: String,
        /// The rank of `right`.
        right_rank: Rank,
    },
    /// The message of a rank cannot be decoded, as of a rank of another version.
    #[error("cannot decode {message}: {problem}; start all ranks with one version of dcp", message = Message(.message), problem = Message(.problem))]
    Message {
        /// The name of the message, such as "the request of rank 3".
        message: String,
        /// The reason.
        problem: String,
    },
    /// Ranks are at different steps of one protocol.
    #[error("ranks are out of step: {problem}; start all ranks with the same program and settings", problem = Message(.problem))]
    OutOfStep {
        /// The difference among the ranks.
        problem: String,
    },
}

/// The thing that ranks describe differently.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanSubject {
    /// A tensor or object, by its FQN.
    Entry(String),
    /// The state dict as a whole.
    State,
}

impl fmt::Display for PlanSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entry(fqn) => Quoted(fqn).fmt(f),
            Self::State => f.write_str("the whole state"),
        }
    }
}

impl PlanError {
    /// `message`, such as "the request of rank 3", cannot be decoded because of `problem`.
    #[must_use]
    pub fn message(message: impl Into<String>, problem: impl Into<String>) -> Self {
        RanksProblem::Message { message: message.into(), problem: problem.into() }.into()
    }

    /// Ranks are at different steps of one protocol, as `problem` shows.
    #[must_use]
    pub fn out_of_step(problem: impl Into<String>) -> Self {
        RanksProblem::OutOfStep { problem: problem.into() }.into()
    }
}
