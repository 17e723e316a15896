//! Problems of the chunks of one tensor.

use super::PlanError;
use crate::names::rank::Rank;
use crate::text::{Message, Quoted};

/// The reason why chunks do not make up their tensor. In a save, the program that divides the
/// tensor among ranks changes that; in a stored index, the checkpoint is that of a wrong writer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChunksProblem {
    /// A chunk or a shard has another number of axes than the tensor.
    Axes {
        /// Axes of the tensor.
        expected: usize,
        /// Axes of the chunk.
        found: usize,
    },
    /// A region is not inside of the tensor, or of the part of it that it belongs to.
    Outside {
        /// The region.
        region: String,
        /// The shape or part that it should be inside of.
        bounds: String,
        /// The rank that offers the region, where known.
        rank: Option<Rank>,
    },
    /// Two chunks share elements.
    Overlap {
        /// One chunk.
        first: String,
        /// The other.
        second: String,
    },
    /// The chunks leave elements out.
    Uncovered {
        /// Elements of the tensor.
        expected: u64,
        /// Elements of all chunks together.
        found: u64,
    },
    /// The chunks are so irregular that the search for overlaps stopped at its limit.
    TooIrregular,
}

impl ChunksProblem {
    /// The error of the tensor that has this problem.
    #[must_use]
    pub fn of(self, fqn: impl Into<String>) -> PlanError {
        PlanError::Chunks { fqn: fqn.into(), problem: self }
    }

    pub(super) fn about(&self, fqn: &str) -> String {
        let fqn = Quoted(fqn);
        match self {
            Self::Axes { expected, found } => {
                format!("{fqn} has {expected} axes, and a chunk of it has {found}")
            }
            Self::Outside { region, bounds, rank } => {
                let (region, bounds) = (Message(region), Message(bounds));
                let offered = rank.map_or_else(String::new, |rank| format!(", of rank {rank},"));
                format!("region {region} of {fqn}{offered} is outside of {bounds}")
            }
            Self::Overlap { first, second } => {
                format!("{fqn} has overlapping chunks {} and {}", Message(first), Message(second))
            }
            Self::Uncovered { expected, found } => {
                format!("the chunks of {fqn} hold {found} of its {expected} elements")
            }
            Self::TooIrregular => format!(
                "the chunks of {fqn} are too irregular to be checked for overlaps; save it in a \
                 regular grid"
            ),
        }
    }
}
