//! Errors of a single sharded leaf.

use dcp_core::text::{Message, Quoted};
use dcp_core::{DType, Dims};

/// A shard or sharded object contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// The data has another element type than was declared.
    #[error("{key} is declared as {declared}, but its data is {data}", key = Quoted(.key))]
    DType {
        /// The tensor.
        key: String,
        /// As declared.
        declared: DType,
        /// As the data has it.
        data: DType,
    },
    /// The data has another shape than was declared.
    #[error("{key} has local shape {local}, but its data has shape {data}", key = Quoted(.key))]
    DataShape {
        /// The tensor.
        key: String,
        /// As declared.
        local: Dims,
        /// As the data has it.
        data: Dims,
    },
    /// Lists that must have one number an axis differ in length.
    #[error("{key} has {found} {what}, but its global shape {global} has {} axes", .global.ndim(), key = Quoted(.key))]
    Axes {
        /// The tensor.
        key: String,
        /// The items whose number is wrong.
        what: &'static str,
        /// The number of these items.
        found: usize,
        /// The global shape.
        global: Dims,
    },
    /// A shard of a regular grid does not lie on it.
    #[error(
        "{key} has a regular grid, but on axis {axis} offset {offset} is not a multiple of local size {local}; leave out the axis fragmentations if the shards are uneven", key = Quoted(.key))]
    OffGrid {
        /// The tensor.
        key: String,
        /// The global axis.
        axis: usize,
        /// The offset of the shard along the axis, in elements.
        offset: u64,
        /// The length of the shard along the axis, in elements.
        local: u64,
    },
    /// `(axis, position, fragments)` that describes no place.
    #[error("{key} cannot be fragment {position} of {fragments} on axis {axis}: {problem}", key = Quoted(.key))]
    RankOffset {
        /// The tensor.
        key: String,
        /// The global axis.
        axis: usize,
        /// The position of the shard among the fragments.
        position: u64,
        /// The number of fragments.
        fragments: u64,
        /// The problem.
        problem: &'static str,
    },
    /// A place that is described in two ways.
    #[error("the place of {key} is described in two ways: {problem}", key = Quoted(.key))]
    Misplaced {
        /// The tensor.
        key: String,
        /// The contradiction.
        problem: &'static str,
    },
    /// Sizes beyond what 64 bits can count.
    #[error("{key} is too large: {problem}", key = Quoted(.key), problem = Message(.problem))]
    TooLarge {
        /// The tensor.
        key: String,
        /// The number that exceeds 64 bits.
        problem: String,
    },
    /// A flattened range that does not fit.
    #[error("{key} has the flattened range {start}..{end}: {problem}", key = Quoted(.key), problem = Message(.problem))]
    Flattened {
        /// The tensor.
        key: String,
        /// First element.
        start: u64,
        /// End of the elements.
        end: u64,
        /// The problem.
        problem: String,
    },
    /// A part of a shard that cannot be taken as a shard of its own.
    #[error("cannot narrow {key} on axis {axis} to {len} elements from {start}: {problem}", key = Quoted(.key), problem = Message(.problem))]
    Narrow {
        /// The tensor.
        key: String,
        /// The local axis.
        axis: usize,
        /// First element.
        start: u64,
        /// Elements.
        len: u64,
        /// The reason why the part is no shard of its own.
        problem: String,
    },
    /// A sharded object's key or place that cannot be stored.
    #[error("{key} cannot be the key of a sharded object: {problem}", key = Quoted(.key), problem = Message(.problem))]
    Object {
        /// The key.
        key: String,
        /// The reason why it cannot be stored.
        problem: String,
    },
    /// A factory could not build or merge.
    #[error("the factory of {key} failed: {problem}", key = Quoted(.key), problem = Message(.problem))]
    Factory {
        /// The factory's key.
        key: String,
        /// The error of the factory.
        problem: String,
    },
    /// Two values for the same place of a state dict.
    #[error("cannot merge state dicts at {path}: {problem}", problem = Message(.problem))]
    Merge {
        /// The place, its steps joined by dots.
        path: String,
        /// The value that was found.
        problem: String,
    },
}
