#![doc = include_str!("../README.md")]
//!
//! This crate has no files, no runtime and no formats. It defines tensors, state dicts, plans and
//! the index of a checkpoint, and the contracts of a storage, a collective, a planner and a format:
//!
//! | you have | you implement |
//! |---|---|
//! | a place to keep bytes | [`Storage`], [`Upload`](storage::Upload) |
//! | a way for ranks to talk | [`Collective`] |
//! | a checkpoint format | [`format::CheckpointFormat`], [`StorageReader`], [`StorageWriter`] |
//! | a policy that assigns writes to ranks | [`SavePlanner`](planner::SavePlanner), [`LoadPlanner`](planner::LoadPlanner) |
//! | tensors on a device | [`DeviceMemory`](device::DeviceMemory) |
//! | other sources and destinations of tensors | [`DataSource`](checkpoint::DataSource), [`DataSink`](checkpoint::DataSink) |
//! | something with state | [`Stateful`] |
//!
//! Traits here have no default methods, so an implementation or decorator cannot forget a new one.
//! Conveniences for callers are in extension traits such as [`StorageExt`](storage::StorageExt).
//!
//! The most used names are at the root, the others in modules:
//!
//! | module | contents |
//! |---|---|
//! | [`checkpoint`], [`save_run`] | the contracts of formats, and the order of their calls |
//! | [`storage`], [`registry`], [`location`] | the contract of storages, and their URLs |
//! | [`planner`], [`plan`] | the contract of planners, and plans |
//! | [`metadata`] | the index of a checkpoint |
//! | [`value`], [`path`] | plain data of a state dict, and its nesting |
//! | [`tensor`], [`memory`], [`device`], [`region`], [`dims`], [`dtype`] | tensors, their memory and their geometry |
//! | [`error`], [`text`] | errors, and untrusted text in messages |
//! | [`mod@format`] | formats as plug-ins |
//! | [`wire`] | messages between ranks |
//!
//! A *shard* is what a rank holds in memory, a *chunk* what a file stores, a *region* a box of
//! elements. Offsets and sizes are in elements per axis; `byte_offset` and `byte_len` are in bytes.

pub mod checkpoint;
mod collective;
pub mod device;
pub mod digest;
pub mod dims;
pub mod dtype;
pub mod error;
pub mod format;
pub mod key;
pub mod location;
pub mod memory;
pub mod metadata;
pub mod overlap;
pub mod path;
mod payload;
pub mod plan;
mod plan_check;
pub mod planner;
mod rank;
pub mod region;
pub mod registry;
pub mod save_run;
pub mod storage;
mod streams;
pub mod tensor;
mod tensor_view;
pub mod text;
pub mod value;
pub mod wire;

/// The crate of [`Payload`]'s pieces and of [`HostMemory::from_bytes`].
pub use bytes;
pub use checkpoint::{StateDict, Stateful, StorageReader, StorageWriter};
pub use collective::Collective;
pub use dims::Dims;
pub use dtype::DType;
pub use error::{
    CheckpointError, CollectiveError, FormatError, PlanError, StorageError, StorageErrorKind,
};
pub use key::Key;
pub use memory::{Buffer, HostMemory};
pub use metadata::CheckpointMetadata;
pub use payload::Payload;
pub use rank::Rank;
pub use region::Region;
pub use storage::Storage;
pub use tensor::{Shard, Tensor};
pub use tensor_view::TensorView;
pub use value::Value;
