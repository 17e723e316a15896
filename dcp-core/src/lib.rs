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
//! The most used names are at the root, the others in modules. The source has the modules in
//! folders, its floors: each uses the floors above it in this table and none below.
//!
//! | floor | modules | contents |
//! |---|---|---|
//! | `text` | [`text`] | untrusted text in messages |
//! | `names` | [`key`] | names of stored objects and ranks |
//! | `tensors` | [`tensor`], [`memory`], [`device`], [`region`], [`overlap`], [`dims`], [`dtype`] | tensors, their memory and their geometry |
//! | `error` | [`error`] | errors, and who can act on each |
//! | `storages` | [`storage`], [`registry`], [`location`] | the contract of storages, and their URLs |
//! | `state` | [`value`], [`path`] | plain data of a state dict, and its nesting |
//! | `plans` | [`metadata`], [`plan`], [`planner`] | the index of a checkpoint, plans, and the contract of planners |
//! | `protocol` | [`checkpoint`], [`save_run`], [`wire`], [`digest`] | the contracts of formats, the order of their calls, and messages between ranks |
//! | `format` | [`mod@format`] | formats as plug-ins |
//!
//! A *shard* is what a rank holds in memory, a *chunk* what a file stores, a *region* a box of
//! elements. Offsets and sizes are in elements per axis; `byte_offset` and `byte_len` are in bytes.

pub mod error;
pub mod format;
mod names;
mod plans;
mod protocol;
mod state;
mod storages;
mod tensors;
pub mod text;

/// The crate of [`Payload`]'s pieces and of [`HostMemory::from_bytes`].
pub use bytes;
pub use error::{
    CheckpointError, CollectiveError, FormatError, PlanError, StorageError, StorageErrorKind,
};
pub use names::key;
pub use names::key::Key;
pub use names::rank::Rank;
pub use plans::metadata::CheckpointMetadata;
pub use plans::{metadata, plan, planner};
pub use protocol::checkpoint::{StateDict, Stateful, StorageReader, StorageWriter};
pub use protocol::collective::Collective;
pub use protocol::{checkpoint, digest, save_run, wire};
pub use state::value::Value;
pub use state::{path, value};
pub use storages::storage::Storage;
pub use storages::{location, registry, storage};
pub use tensors::dims::Dims;
pub use tensors::dtype::DType;
pub use tensors::memory::{Buffer, HostMemory};
pub use tensors::payload::Payload;
pub use tensors::region::Region;
pub use tensors::tensor::{Shard, Tensor};
pub use tensors::tensor_view::TensorView;
pub use tensors::{device, dims, dtype, memory, overlap, region, tensor};
