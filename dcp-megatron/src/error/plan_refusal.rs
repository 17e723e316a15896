//! Errors of sharded state dicts that cannot be planned.

use dcp_core::text::{Message, Quoted};
use dcp_core::{CheckpointError, PlanError, Rank};

use super::MegatronError;

/// A sharded state dict cannot be planned. The training program acts: it changes a request, a replica id,
/// a shard or a key.
///
/// It reaches callers as [`PlanError::Plugin`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanRefusal {
    /// One rank requests a key in two ways.
    #[error("this rank requests {key} as {first} and as {second}; request it once", key = Quoted(.key), first = Message(.first), second = Message(.second))]
    RequestedTwice {
        /// The key.
        key: String,
        /// One request.
        first: String,
        /// The other.
        second: String,
    },
    /// More than one rank, or one rank twice, has the main replica of a shard.
    #[error(
        "of the shard of {key} at {offset} there must be one main replica, but {}; give one of \
         them another replica id",
        main_replicas(*.first, *.second), key = Quoted(.key)
    )]
    MainReplica {
        /// The key.
        key: String,
        /// The offsets of the shard.
        offset: String,
        /// One rank.
        first: Rank,
        /// The other rank, or the same one.
        second: Rank,
    },
    /// A shard of a save has neither memory nor a value.
    #[error("{key} has no data to save; give its shards memory", key = Quoted(.key))]
    NoData {
        /// The key.
        key: String,
    },
    /// A key belongs to the format.
    #[error("the format uses the name {key} itself: {instead}", key = Quoted(.key))]
    ReservedKey {
        /// The key.
        key: String,
        /// The way to save the same under another key.
        instead: &'static str,
    },
}

fn main_replicas(first: Rank, second: Rank) -> String {
    match first == second {
        true => format!("rank {first} has it twice"),
        false => format!("ranks {first} and {second} have it"),
    }
}

impl From<PlanRefusal> for PlanError {
    fn from(error: PlanRefusal) -> Self {
        Self::plugin(error)
    }
}

impl From<PlanRefusal> for CheckpointError {
    fn from(error: PlanRefusal) -> Self {
        PlanError::from(error).into()
    }
}

impl From<PlanRefusal> for MegatronError {
    fn from(error: PlanRefusal) -> Self {
        Self::Checkpoint(error.into())
    }
}
