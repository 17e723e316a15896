//! Errors of planners: a state that cannot be saved or loaded, or a plan that is invalid.

mod subject;

use std::ops::Range;

use super::TensorError;
use super::text::{container, entry_and_chunk, list, main_replicas, quoted};
use crate::rank::Rank;
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
        /// The description by one rank.
        left: String,
        /// The rank that says it.
        left_rank: Rank,
        /// The description by another rank.
        right: String,
        /// The rank of `right`.
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
        /// The description in the plan.
        planned: String,
        /// The description of the tensor or object as ranks hold it.
        held: String,
    },
    /// A planner does not store a part that ranks hold.
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
        /// The part of the tensor, or all of it.
        part: String,
        /// The rank that holds it.
        holder: String,
    },
    /// A process that saves alone holds a part of a tensor.
    #[error(
        "this process saves alone and holds {found} of the {expected} elements of {fqn}, so the checkpoint \
         would lack the others; save in the group of all ranks that hold parts, or allow parts",
        fqn = Quoted(.fqn)
    )]
    AlonePart {
        /// The tensor.
        fqn: String,
        /// The elements of the tensor.
        expected: u64,
        /// The elements of the shards that the process holds.
        found: u64,
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
        /// The rank that offers the chunk, where known.
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
    /// The chunks of a tensor are so irregular that the search for overlaps stopped at its limit.
    #[error("the chunks of {fqn} are too irregular to be checked for overlaps; save it in a regular grid", fqn = Quoted(.fqn))]
    TooIrregular {
        /// The tensor.
        fqn: String,
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
    /// Mesh, coordinate, placements and shape do not fit together.
    #[error("invalid placement: {problem}", problem = Message(.problem))]
    InvalidPlacement {
        /// The contradiction among mesh, coordinate, placements and shape.
        problem: String,
    },
    /// Ranks hold terms of a sum, which cannot be saved or loaded.
    #[error("{fqn} has a partial placement; reduce it to a sharded or replicated tensor first", fqn = Quoted(.fqn))]
    Partial {
        /// The tensor.
        fqn: String,
    },
    /// An entry of a checkpoint's index contradicts itself.
    #[error("the index of the checkpoint is invalid for {fqn}: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    InvalidIndex {
        /// The tensor or object.
        fqn: String,
        /// The contradiction.
        problem: String,
    },
    /// A plan, a message or an index has more of something than its tables can count.
    #[error("{what} exceeds the limit of {limit}", what = Message(.what))]
    TooLarge {
        /// The quantity that is too large, such as "the number of keys".
        what: String,
        /// The largest number that is possible.
        limit: u64,
    },
    /// There is not enough memory.
    #[error("cannot allocate {byte_len} bytes for {what}")]
    OutOfMemory {
        /// The use of the memory.
        what: String,
        /// The number of bytes requested.
        byte_len: u64,
    },
    /// A key of a dict has no text, so that what it leads to has no name.
    #[error(
        "a key of type {kind} in {} has no text; use text or numbers as keys", container(.parent)
    )]
    UnnamedKey {
        /// The dict; empty for the state dict itself.
        parent: String,
        /// The type of the key.
        kind: String,
    },
    /// A state dict has too many levels.
    #[error("{fqn} is nested more than {limit} levels deep; flatten its containers", fqn = Quoted(.fqn))]
    TooDeep {
        /// The beginning of the name.
        fqn: String,
        /// The number of levels that are possible.
        limit: usize,
    },
    /// The path of a leaf has no place in the nested state dict.
    #[error("the path of {fqn} does not fit the state dict: {problem}; change one of the paths", fqn = Quoted(.fqn), problem = Message(.problem))]
    PathConflict {
        /// The leaf.
        fqn: String,
        /// The entry or container that has the place.
        problem: String,
    },
    /// A chunk or a shard has another number of axes than its tensor.
    #[error("{fqn} has {expected} axes, and a chunk of it has {found}", fqn = Quoted(.fqn))]
    AxisCount {
        /// The tensor.
        fqn: String,
        /// Axes of the tensor.
        expected: usize,
        /// Axes of the chunk.
        found: usize,
    },
    /// A tensor is needed, and the entry is an object.
    #[error("{fqn} is not a tensor; request a tensor, or read it as an object", fqn = Quoted(.fqn))]
    NotATensor {
        /// The object.
        fqn: String,
    },
    /// An object is needed, and the entry is a tensor.
    #[error("{fqn} is not an object; request an object, or read it as a tensor", fqn = Quoted(.fqn))]
    NotAnObject {
        /// The tensor.
        fqn: String,
    },
    /// An entry is of a kind that this version does not know.
    #[error("{fqn} is of an unknown kind; use a newer version of dcp", fqn = Quoted(.fqn))]
    UnknownKind {
        /// The entry.
        fqn: String,
    },
    /// The format has no form for a tensor or an object.
    #[error("the format cannot store {fqn}: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    NotStorable {
        /// The tensor or object.
        fqn: String,
        /// The reason, and a form that can be stored instead.
        problem: String,
    },
    /// Elements have no conversion to the requested dtype.
    #[error("cannot cast {fqn}: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    NotCastable {
        /// The tensor or the option.
        fqn: String,
        /// The dtypes, and why not.
        problem: String,
    },
    /// A leaf of a save has neither memory nor a value.
    #[error("{fqn} has no data to save; give its shards memory", fqn = Quoted(.fqn))]
    NoData {
        /// The tensor or object.
        fqn: String,
    },
    /// A name belongs to the format.
    #[error("the format uses the name {fqn} itself: {instead}", fqn = Quoted(.fqn))]
    ReservedName {
        /// The name.
        fqn: String,
        /// The way to save the same under another name.
        instead: &'static str,
    },
    /// A plan stores a part that the rank does not hold.
    #[error("the plan stores {part} of {fqn}, which this rank does not hold; the planner is wrong", part = Message(.part), fqn = Quoted(.fqn))]
    NotHeld {
        /// The tensor or object.
        fqn: String,
        /// The region, or all of it.
        part: String,
    },
    /// More than one rank, or one rank twice, has the main replica of a shard.
    #[error(
        "of the shard of {fqn} at {offset} there must be one main replica, but {}; give one of \
         them another replica id",
        main_replicas(*.first, *.second), fqn = Quoted(.fqn)
    )]
    MainReplica {
        /// The tensor or object.
        fqn: String,
        /// The offsets of the shard.
        offset: String,
        /// One rank.
        first: Rank,
        /// The other rank, or the same one.
        second: Rank,
    },
    /// One rank requests a name in two ways.
    #[error("this rank requests {fqn} as {first} and as {second}; request it once", fqn = Quoted(.fqn))]
    RequestedTwice {
        /// The tensor or object.
        fqn: String,
        /// One request.
        first: String,
        /// The other.
        second: String,
    },
    /// The state of an optimizer is not laid out as one.
    #[error("the optimizer state is invalid at {fqn}: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    InvalidOptimizer {
        /// The key or the part of the optimizer.
        fqn: String,
        /// The problem of that key or part.
        problem: String,
    },
    /// Parameters of one group have different settings in the checkpoint.
    #[error(
        "{first} and {second} of {group} have different {field} in the checkpoint; load them in \
         groups of their own",
        group = Quoted(.group), first = Quoted(.first), second = Quoted(.second), field = Quoted(.field)
    )]
    MixedGroup {
        /// The group of the optimizer that is loaded.
        group: String,
        /// One parameter.
        first: String,
        /// The other.
        second: String,
        /// The setting.
        field: String,
    },
    /// A mapping of names does not fit the checkpoint.
    #[error("the key mapping {problem}: {}", quoted(.fqns))]
    KeyMapping {
        /// The names.
        fqns: Vec<String>,
        /// The predicate of a sentence about the mapping.
        problem: &'static str,
    },
    /// A tensor cannot be assembled from the pieces that a view gives it.
    #[error("cannot assemble {fqn} from its pieces: {problem}", fqn = Quoted(.fqn), problem = Message(.problem))]
    Assembly {
        /// The assembled tensor.
        fqn: String,
        /// The piece that does not fit, and the reason.
        problem: String,
    },
    /// Objects that share memory in a file need too much of it when each is read by itself.
    #[error(
        "cannot read {fqn}: the objects before it need more than {limit} bytes when each is read \
         by itself, because they share memory in the file; read fewer of them, or the whole file",
        fqn = Quoted(.fqn)
    )]
    ObjectMemory {
        /// The first object that is not read.
        fqn: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// Names that must be in the checkpoint are not; all of them.
    #[error("the checkpoint has no {}", quoted(.fqns))]
    Missing {
        /// The names.
        fqns: Vec<String>,
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
    /// Plans are not one for each rank.
    #[error("{made_by} made plans for {found} of {expected} ranks", made_by = Message(.made_by))]
    PlanCount {
        /// The planner or writer.
        made_by: String,
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
    /// A region is not inside of the one that it is a part of.
    #[error("region {region} of {fqn} is outside of {bounds}", region = Message(.region), fqn = Quoted(.fqn), bounds = Message(.bounds))]
    Outside {
        /// The tensor.
        fqn: String,
        /// The region.
        region: String,
        /// The region or shape that it is a part of.
        bounds: String,
    },
    /// Memory for a region has another shape.
    #[error("the memory for region {region} of {fqn} has shape {shape}", region = Message(.region), fqn = Quoted(.fqn), shape = Message(.shape))]
    DestinationShape {
        /// The tensor.
        fqn: String,
        /// The region that is read.
        region: String,
        /// The shape of the memory.
        shape: String,
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
    /// All names that a save can give to new files exist already.
    #[error("all {tried} names for new files exist already; delete files of unfinished saves")]
    NoFreeName {
        /// The number of names that were tried.
        tried: u64,
    },
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
    SourceLength {
        /// The tensor or object.
        fqn: String,
        /// The requested bytes.
        requested: Range<u64>,
        /// All bytes of the item.
        byte_len: u64,
        /// The number of bytes returned.
        returned: u64,
    },
    /// A tensor cannot be made, or its elements cannot be had.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Several problems at once.
    #[error("{}", list(.0))]
    Many(Vec<PlanError>),
}
