#![doc = include_str!("../README.md")]
//!
//! This crate has no files, no runtime and no formats. It defines tensors, state dicts, plans and
//! the index of a checkpoint, and the contracts of a storage, a collective, a planner and a format:
//!
//! | you have | you implement |
//! |---|---|
//! | a place to keep bytes | [`Storage`], [`Upload`] |
//! | a way for ranks to talk | [`Collective`] |
//! | a checkpoint format | [`format::CheckpointFormat`], [`StorageReader`], [`StorageWriter`] |
//! | a policy for who writes what | [`SavePlanner`], [`LoadPlanner`] |
//! | tensors of your own | [`DataSource`], [`DataSink`] |
//! | something with state | [`Stateful`] |
//!
//! Traits here have no default methods, so an implementation or decorator cannot forget a new one.
//! Conveniences for callers are in extension traits such as [`StorageExt`].
//!
//! A *shard* is what a rank holds in memory, a *chunk* what a file stores, a *region* a box of
//! elements. Offsets and sizes are in elements per axis; `byte_offset` and `byte_len` are in bytes.

mod checkpoint;
mod collective;
mod dims;
mod dtype;
pub mod error;
pub mod format;
mod key;
pub mod location;
mod memory;
mod metadata;
mod overlap;
mod path;
mod payload;
mod plan;
mod plan_check;
mod planner;
mod python_str;
mod region;
mod registry;
mod save_run;
mod shown;
mod storage;
mod tensor;
mod tensor_view;
mod value;
mod wire;

pub use checkpoint::{
    DataSink, DataSource, ReadReport, SaveSession, StateDict, Stateful, StorageReader,
    StorageWriter, WriteReport,
};
pub use collective::Collective;
pub use dims::{Dims, checked_volume};
pub use dtype::{DType, UnknownDType};
pub use error::{
    CheckpointError, CollectiveError, FormatError, Phase, PlanError, Rank, RankFailure, Standing,
    StorageError, StorageErrorKind, StorageOp, error_chain,
};
pub use key::{InvalidKey, Key};
pub use memory::{Buffer, HostMemory, LoanError};
pub use metadata::{
    CheckpointMetadata, ChunkRef, ChunkTable, Encoding, Entry, FileId, Layout, ObjectEntry,
    Placement, Provenance, TensorEntry, TensorProperties, WrappedTensor,
};
pub use overlap::{TooIrregular, find_overlap};
pub use path::{PathItem, StatePath};
pub use payload::Payload;
pub use plan::{
    GlobalPlan, LeafKind, LoadPlan, LoadReport, PlanContext, PlanKey, ReadItem, ReadKind, SavePlan,
    SelectedItem, StateIndex, StateLeaf, TensorSpec, Unoffered, WriteItem, WriteOrder, WritePlan,
};
pub use planner::{LoadPlanner, SavePlanner};
pub use python_str::python_str;
pub use region::{Region, RegionError, Runs};
pub use registry::{Access, StorageRegistry};
pub use save_run::{RankWrite, SaveRun};
pub use shown::{Message, Quoted, beginning, counted, escaped, is_unsafe, message};
pub use storage::{
    Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Storage, StorageExt, Upload,
};
pub use tensor::{Shard, Tensor};
pub use tensor_view::TensorView;
pub use value::{BigInt, Dict, Global, MadeBy, Object, Opaque, Value};
pub use wire::{MessageReader, MessageWriter};
