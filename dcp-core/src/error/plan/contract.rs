//! Problems of plug-ins that break a contract of this crate: planners, writers, readers, and sources
//! and destinations of data.

use std::fmt;
use std::ops::Range;

use super::PlanError;
use crate::error::text::entry_and_chunk;
use crate::text::{Message, Quoted};

/// The difference between a planner's plan and what ranks hold. The author of the planner acts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlannerProblem {
    /// The plan describes something otherwise than it is.
    Untrue {
        /// The description in the plan.
        planned: String,
        /// The description of the tensor or object as ranks hold it.
        held: String,
    },
    /// The plan does not store a part that ranks hold.
    Lost {
        /// The part of the tensor, or all of it.
        part: String,
        /// The rank that holds it.
        holder: String,
    },
    /// The plan stores elements twice.
    Repeated {
        /// One chunk.
        first: String,
        /// The other.
        second: String,
    },
}

impl PlannerProblem {
    /// The predicate of a sentence about the planner.
    pub(super) fn about(&self, fqn: &str) -> String {
        let fqn = Quoted(fqn);
        match self {
            Self::Untrue { planned, held } => format!(
                "plans {fqn} as {planned}, but it is {held}; a planner changes no tensor and no \
                 object (`Settings::cast` saves in another dtype)"
            ),
            Self::Lost { part, holder } => format!(
                "does not store {} of {fqn}, which {holder} holds; names that a planner leaves out \
                 on purpose are in `GlobalPlan::left_out`",
                Message(part)
            ),
            Self::Repeated { first, second } => {
                format!("stores {first} and {second} of {fqn}, which share elements")
            }
        }
    }
}

/// A plan does not fit its index, its rank or its file. The author of the planner or of the writer
/// acts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanProblem {
    /// Plans are not one for each rank.
    #[error("{made_by} made plans for {found} of {expected} ranks")]
    Count {
        /// The maker of the plans.
        made_by: PlanMaker,
        /// Ranks of the save.
        expected: usize,
        /// Plans.
        found: usize,
    },
    /// Something refers to an item that its plan does not have.
    #[error("item {item} of a plan of {items} items does not exist")]
    NoItem {
        /// The number of the item, from 0.
        item: u64,
        /// Items of the plan.
        items: u64,
    },
    /// A plan refers to an entry or a chunk that the index does not have.
    #[error("the index of the checkpoint has no {}", entry_and_chunk(.entry, .chunk))]
    NoEntry {
        /// The position of the entry, from 0.
        entry: u64,
        /// The number of the chunk in that entry, where that is what is missing.
        chunk: Option<u64>,
    },
    /// A plan stores a part that the rank does not hold.
    #[error("the plan stores {part} of {fqn}, which this rank does not hold; the planner is wrong", part = Message(.part), fqn = Quoted(.fqn))]
    NotHeld {
        /// The tensor or object.
        fqn: String,
        /// The region, or all of it.
        part: String,
    },
    /// The place of an item in a write plan is not where its file has it.
    #[error("the write plan misplaces {fqn}: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    Misplaced {
        /// The tensor or object.
        fqn: String,
        /// Its place in the plan, and in the file.
        problem: String,
    },
    /// A file has a name that its format gives to no data file.
    #[error("{file} is not the name of a data file of this format", file = Quoted(.file))]
    FileName {
        /// The file.
        file: String,
    },
}

/// The maker of the plans of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanMaker {
    /// A planner, by its name where that is known.
    Planner(Option<String>),
    /// The writer of a format.
    Writer,
    /// The ranks of a group, each its own.
    Group,
    /// The coordinator, for all ranks.
    Coordinator,
}

impl fmt::Display for PlanMaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Planner(Some(name)) => write!(f, "planner {}", Message(name)),
            Self::Planner(None) => f.write_str("the planner"),
            Self::Writer => f.write_str("the writer"),
            Self::Group => f.write_str("the group"),
            Self::Coordinator => f.write_str("rank 0"),
        }
    }
}

/// A reader, or a source or destination of data, breaks its contract. Its author acts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataProblem {
    /// A reader returned without data that was requested.
    #[error("the reader did not return {part} of {fqn}; read it again, or report it to the author of the reader", part = Message(.part), fqn = Quoted(.fqn))]
    Unread {
        /// The tensor or object.
        fqn: String,
        /// A number of elements and a region, or "the value".
        part: String,
    },
    /// A reader returned data that was not requested.
    #[error(
        "the reader returned data that was not requested, for entry {entry} and leaf {leaf}; report it to the author of the reader"
    )]
    Unrequested {
        /// The position of the entry in the index.
        entry: u32,
        /// The leaf of the plan's item.
        leaf: u32,
    },
    /// A data source returned another number of bytes than was requested.
    #[error(
        "the data source of {fqn} returned {returned} bytes for bytes {}..{} of {byte_len}",
        .requested.start, .requested.end, fqn = Quoted(.fqn)
    )]
    Source {
        /// The tensor or object.
        fqn: String,
        /// The requested bytes.
        requested: Range<u64>,
        /// All bytes of the item.
        byte_len: u64,
        /// The number of bytes returned.
        returned: u64,
    },
    /// Memory that a region is read into has another shape or size.
    #[error(
        "the memory for region {region} of {fqn} has shape {shape} in {byte_len} bytes, and the \
         region needs {expected} bytes",
        region = Message(.region), fqn = Quoted(.fqn), shape = Message(.shape)
    )]
    Destination {
        /// The tensor.
        fqn: String,
        /// The region that is read.
        region: String,
        /// Bytes of the region.
        expected: u64,
        /// The shape of the memory.
        shape: String,
        /// Bytes of the memory.
        byte_len: u64,
    },
}

impl PlanError {
    /// Item `item`, from 0, of a plan of `items` items does not exist.
    #[must_use]
    pub fn no_item(item: u64, items: u64) -> Self {
        PlanProblem::NoItem { item, items }.into()
    }

    /// The index has no entry at position `entry`, or that entry has no chunk of number `chunk`.
    #[must_use]
    pub fn no_entry(entry: u64, chunk: Option<u64>) -> Self {
        PlanProblem::NoEntry { entry, chunk }.into()
    }

    /// A reader did not return `part` of `fqn`: a number of elements and a region, or "the value".
    #[must_use]
    pub fn unread(fqn: impl Into<String>, part: impl Into<String>) -> Self {
        DataProblem::Unread { fqn: fqn.into(), part: part.into() }.into()
    }
}
