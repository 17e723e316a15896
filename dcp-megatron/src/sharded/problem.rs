//! Problems of all ranks' shards together.

use std::fmt;

use dcp_core::text::Quoted;
use serde::{Deserialize, Serialize};

/// The shards and objects of all ranks do not make the tensors and grids that they claim to be
/// parts of. Every rank of the group gets the same list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct IntegrityError {
    /// Everything that is wrong, key by key.
    pub problems: Vec<ShardingProblem>,
}

/// One thing that is wrong with the shards of one key. Shards are boxes of the whole tensor, such
/// as `[0:2, 4:8]`, and objects their place in the grid, such as `object [0, 1] of [1, 2]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ShardingProblem {
    /// No rank holds the main replica.
    Missing {
        /// The tensor or object.
        key: String,
        /// The shards; the first ones, when they are very many.
        shards: Vec<String>,
        /// The number of shards.
        count: u64,
    },
    /// Several ranks, or one of them several times, hold a main replica.
    Double {
        /// The tensor or object.
        key: String,
        /// The shards and the ranks that claim them; the first ones, when they are very many.
        shards: Vec<(String, Vec<u32>)>,
        /// The number of shards.
        count: u64,
    },
    /// A shard ends outside its tensor.
    Outside {
        /// The tensor or object.
        key: String,
        /// The rank of the shard.
        rank: u32,
        /// The shard.
        shard: String,
        /// The whole tensor's shape, or the grid.
        shape: String,
    },
    /// A regular grid that does not cover the whole tensor.
    Grid {
        /// The tensor.
        key: String,
        /// The rank that declares it.
        rank: u32,
        /// The sizes that do not divide.
        problem: String,
    },
    /// Ranks say different things of one key.
    Disagreement {
        /// The tensor or object.
        key: String,
        /// The declaration of one rank.
        left: String,
        /// That rank.
        left_rank: u32,
        /// The declaration of another rank.
        right: String,
        /// That other rank.
        right_rank: u32,
    },
    /// Shards of an irregular grid share elements.
    Overlap {
        /// The tensor.
        key: String,
        /// A shard and its rank.
        first: (String, u32),
        /// Another shard and its rank.
        second: (String, u32),
    },
    /// Shards of an irregular grid, or flattened ranges, leave elements out.
    Uncovered {
        /// The tensor.
        key: String,
        /// Elements of the tensor.
        expected: u64,
        /// Elements of all shards.
        found: u64,
    },
    /// Flattened ranges of one shard that do not follow each other.
    Ranges {
        /// The tensor.
        key: String,
        /// The shard.
        shard: String,
        /// The problem of the ranges.
        problem: String,
    },
    /// The shards are too many and too irregular to be compared in time.
    TooIrregular {
        /// The tensor.
        key: String,
    },
}

impl fmt::Display for IntegrityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        f.write_str("the shards of all ranks do not make whole tensors: ")?;
        for (at, problem) in self.problems.iter().take(SHOWN).enumerate() {
            write!(f, "{}{problem}", if at == 0 { "" } else { "; " })?;
        }
        match self.problems.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

impl std::error::Error for IntegrityError {}

impl fmt::Display for ShardingProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { key, shards, count } => {
                write!(f, "{} has no main replica of {}", Quoted(key), listed(shards, *count))
            }
            Self::Double { key, shards, count } => {
                let claims: Vec<String> = shards
                    .iter()
                    .take(SHARDS_SHOWN)
                    .map(|(shard, ranks)| format!("{shard} ({})", of_ranks(ranks)))
                    .collect();
                write!(
                    f,
                    "{} has several main replicas of {}",
                    Quoted(key),
                    listed(&claims, *count)
                )
            }
            Self::Outside { key, rank, shard, shape } => {
                write!(f, "{}: {shard} of rank {rank} is outside {shape}", Quoted(key))
            }
            Self::Grid { key, rank, problem } => {
                write!(f, "{} on rank {rank}: {problem}", Quoted(key))
            }
            Self::Disagreement { key, left, left_rank, right, right_rank } => {
                write!(
                    f,
                    "{} is {left} on rank {left_rank} but {right} on rank {right_rank}",
                    Quoted(key)
                )
            }
            Self::Overlap { key, first, second } => write!(
                f,
                "{key:?}: {} of rank {} overlaps {} of rank {}",
                first.0, first.1, second.0, second.1
            ),
            Self::Uncovered { key, expected, found } => {
                write!(f, "the shards of {} hold {found} of its {expected} elements", Quoted(key))
            }
            Self::Ranges { key, shard, problem } => {
                write!(f, "{}, {shard}: {problem}", Quoted(key))
            }
            Self::TooIrregular { key } => {
                write!(f, "the shards of {} are too irregular to be compared", Quoted(key))
            }
        }
    }
}

const SHARDS_SHOWN: usize = 8;

fn listed(shards: &[String], count: u64) -> String {
    let shown = shards.len().min(SHARDS_SHOWN);
    let mut text = shards[..shown].join(", ");
    let more = count.saturating_sub(shown as u64);
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

fn of_ranks(ranks: &[u32]) -> String {
    let shown: Vec<String> = ranks.iter().take(SHARDS_SHOWN).map(ToString::to_string).collect();
    let more = ranks.len().saturating_sub(SHARDS_SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let ranks = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{ranks} {}{more}", shown.join(", "))
}
