//! What a planner says of a state that cannot be saved or loaded.

use super::Rank;
use crate::region::RegionError;
use crate::text::{Message, Quoted};

/// A plan cannot be made, or makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Two paths of the state dict flatten to the same name.
    #[error("two entries of the state dict flatten to {fqn}; rename one of them", fqn = Quoted(.fqn))]
    DuplicateFqn {
        /// The name.
        fqn: String,
    },
    /// Ranks describe one tensor differently.
    #[error("{fqn} is {left} on rank {left_rank} but {right} on rank {right_rank}", fqn = Quoted(.fqn), left = Message(.left), right = Message(.right))]
    Disagreement {
        /// The tensor or object.
        fqn: String,
        /// What one rank says.
        left: String,
        /// The rank that says it.
        left_rank: Rank,
        /// What another rank says.
        right: String,
        /// That other rank.
        right_rank: Rank,
    },
    /// A planner describes something otherwise than it is.
    #[error(
        "planner {planner} plans {fqn:?} as {planned}, but it is {held}; a planner changes no \
         tensor and no object (`Saver::cast` saves in another dtype)"
    )]
    Untrue {
        /// The planner.
        planner: String,
        /// The tensor or object.
        fqn: String,
        /// What the plan says.
        planned: String,
        /// What is there.
        held: String,
    },
    /// A planner loses what ranks hold.
    #[error(
        "planner {planner} does not store {part} of {fqn}, which {holder} holds; names that a \
         planner leaves out on purpose are in `GlobalPlan::left_out`",
        part = Message(.part), fqn = Quoted(.fqn)
    )]
    Lost {
        /// The planner.
        planner: String,
        /// The tensor or object.
        fqn: String,
        /// A part of the tensor, or all of what it is.
        part: String,
        /// The rank that holds it.
        holder: String,
    },
    /// A planner stores elements twice.
    #[error(
        "planner {planner} stores {first} and {second} of {fqn}, which share elements",
        fqn = Quoted(.fqn)
    )]
    Repeated {
        /// The planner.
        planner: String,
        /// The tensor.
        fqn: String,
        /// One chunk.
        first: String,
        /// The other.
        second: String,
    },
    /// A chunk is partly outside its tensor.
    #[error("{fqn} has shape {shape}, but a chunk of rank {rank:?} is at {chunk}", fqn = Quoted(.fqn), shape = Message(.shape), chunk = Message(.chunk))]
    OutOfBounds {
        /// The tensor.
        fqn: String,
        /// Its shape.
        shape: String,
        /// The chunk.
        chunk: String,
        /// Whose chunk it is, where known.
        rank: Option<Rank>,
    },
    /// Two chunks share elements.
    #[error("{fqn} has overlapping chunks {first} and {second}", fqn = Quoted(.fqn), first = Message(.first), second = Message(.second))]
    Overlap {
        /// The tensor.
        fqn: String,
        /// One chunk.
        first: String,
        /// The other.
        second: String,
    },
    /// The chunks leave elements out.
    #[error("the chunks of {fqn} hold {found} of its {expected} elements", fqn = Quoted(.fqn))]
    Uncovered {
        /// The tensor.
        fqn: String,
        /// Elements of the tensor.
        expected: u64,
        /// Elements of all chunks together.
        found: u64,
    },
    /// The memory of a shard does not have the size that its region says.
    #[error("shard {region} of {fqn} needs {expected} bytes, its memory has {found}", fqn = Quoted(.fqn))]
    ShardMemory {
        /// The tensor.
        fqn: String,
        /// The shard's region.
        region: String,
        /// Bytes that region and dtype call for.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// Elements are needed in host memory and are on a device.
    #[error("{fqn} is in the memory of {device} and needed in host memory; copy it there first", fqn = Quoted(.fqn), device = Message(.device))]
    OnDevice {
        /// The tensor.
        fqn: String,
        /// The device.
        device: String,
    },
    /// Dtype, shape, region and memory of a tensor do not fit together.
    #[error("invalid tensor: {problem}", problem = Message(.problem))]
    InvalidTensor {
        /// What does not fit.
        problem: String,
    },
    /// Mesh, coordinate, placements and shape do not fit together.
    #[error("invalid placement: {problem}", problem = Message(.problem))]
    InvalidPlacement {
        /// What does not fit.
        problem: String,
    },
    /// Ranks hold terms of a sum, which cannot be saved or loaded.
    #[error("{fqn} has a partial placement; reduce it to a sharded or replicated tensor first", fqn = Quoted(.fqn))]
    Partial {
        /// The tensor.
        fqn: String,
    },
    /// What a checkpoint's index says of an entry contradicts itself.
    #[error("the index of the checkpoint is invalid for {fqn}: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    InvalidIndex {
        /// The tensor or object.
        fqn: String,
        /// The contradiction.
        problem: String,
    },
    /// A plan has more than its tables can count.
    #[error("the plan is too large: {problem}", problem = Message(.problem))]
    TooLarge {
        /// What is more than fits.
        problem: String,
    },
    /// There is not enough memory.
    #[error("cannot allocate {byte_len} bytes for {what}")]
    OutOfMemory {
        /// What the memory is for.
        what: String,
        /// How much was requested.
        byte_len: u64,
    },
    /// Something that cannot be saved or loaded.
    #[error("{fqn} cannot be planned: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    Unsupported {
        /// The tensor or object.
        fqn: String,
        /// Why not, and what to do.
        problem: String,
    },
    /// Names that must be in the checkpoint are not; all of them.
    #[error("the checkpoint has no {}", quoted(.fqns))]
    Missing {
        /// The names.
        fqns: Vec<String>,
    },
    /// A plan or message that contradicts itself or the index, as of a rank of another version.
    #[error("bad plan or message: {problem}", problem = Message(.problem))]
    Wire {
        /// What is wrong with it.
        problem: String,
    },
    /// Several problems at once.
    #[error("{}", list(.0))]
    Many(Vec<PlanError>),
}

impl From<RegionError> for PlanError {
    fn from(error: RegionError) -> Self {
        Self::InvalidTensor { problem: error.to_string() }
    }
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| Quoted(name).to_string()).collect::<Vec<_>>().join(", ")
}

fn list(errors: &[PlanError]) -> String {
    const SHOWN: usize = 10;
    let mut text = errors.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>();
    if errors.len() > SHOWN {
        text.push(format!("and {} more", errors.len() - SHOWN));
    }
    text.join("; ")
}
