//! Checkpoints of [Megatron-Core](https://github.com/NVIDIA/Megatron-LM): its sharded state
//! dicts, its save and load, and every age of its on-disk formats, without Megatron.
//!
//! [`MegatronCheckpoint`] opens a checkpoint for every job of dcp-convert. A trainer describes its
//! state as a [`sharded::ShardedStateDict`], and all ranks [`save`] it and [`load`] it in whatever
//! layout they have:
//!
//! ```
//! use std::sync::Arc;
//!
//! use dcp_core::{DType, HostMemory, Storage, TensorView, Value};
//! use dcp_megatron::sharded::{LocalTensor, ShardedStateDict, ShardedTensor};
//! use dcp_megatron::{LoadOptions, SaveOptions, load, save};
//! use dcp_storage_fs::FsStorage;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let storage: Arc<dyn Storage> = Arc::new(FsStorage::open(folder.path())?);
//! let mut state = ShardedStateDict::new();
//! for layer in 0..2 {
//!     let memory = HostMemory::from_vec(vec![layer as u8; 16]);
//!     let weight = TensorView::contiguous(memory, DType::Float32, [2, 2], 0)?;
//!     let weight = ShardedTensor::from_rank_offsets("layers.weight", weight)
//!         .prepended_axes(1)
//!         .offset(0, layer, 2)
//!         .build()?;
//!     state.insert(format!("layer{layer}"), weight);
//! }
//! state.insert("iteration", Value::Int(10));
//! save(&state, &storage, &SaveOptions::new()).await?;
//!
//! let both = LocalTensor::described(DType::Float32, [2, 2, 2]);
//! let both = ShardedTensor::from_rank_offsets("layers.weight", both).build()?;
//! let request = ShardedStateDict::from([("layers", both)]);
//! let loaded = load(&request, &storage, &LoadOptions::new()).await?.state;
//! assert_eq!(loaded.get("iteration").and_then(Value::as_int), Some(10));
//! let layers = loaded.get("layers").and_then(Value::as_tensor).and_then(|t| t.to_vec());
//! assert_eq!(layers, Some([[0; 16], [1; 16]].concat()));
//! # Ok(())
//! # }
//! ```

mod agreement;
mod args;
mod async_queue;
mod checkpoint;
mod common;
mod common_check;
mod config;
mod contents;
mod describe;
mod error;
mod fitting;
mod flattened;
mod integrity;
mod legacy;
mod load;
mod logical;
pub mod optimizer;
pub mod parallel;
pub mod partition;
mod prepare;
mod remove;
mod request;
mod run;
mod save;
pub mod sharded;
mod strategy;
mod strict;
mod to_torch_dist;
mod tracker;
mod verify;
mod wanted;
mod which;
mod writer;
mod zarr;

pub use args::MegatronArgs;
pub use async_queue::{AsyncCallsQueue, AsyncRequest};
pub use checkpoint::{MegatronCheckpoint, MegatronFormat, OpenOptions};
pub use common::{COMMON_FILE, COMMON_OBJECT, CommonPlace};
pub use common_check::{CommonDifference, CommonDiffers};
pub use config::{Backend, CheckpointingConfig, METADATA_JSON};
pub use contents::{
    Described, check_is_distributed_checkpoint, load_common_state_dict, load_content_metadata,
    load_plain_tensors, load_sharded_metadata, load_tensors_metadata,
};
pub use describe::{Description, Layers, ObjectGroup, ParallelSizes, object_key};
pub use error::MegatronError;
pub use integrity::{Manifest, verify_integrity, write_integrity};
pub use load::{LoadOptions, Loaded, load};
pub use logical::COMMON_STATE;
pub use partition::ParallelLayout;
pub use remove::{Removed, remove_sharded_tensors};
pub use run::{MegatronRun, RunCheckpoint};
pub use save::{MegatronBackgroundSaver, SaveDistribution, SaveOptions, async_save, save};
pub use strategy::{LoadStrategy, Opened, SaveStrategy, Strategies, WriterSettings};
pub use strict::{KeyMismatch, StrictHandling, UnknownStrictHandling};
pub use to_torch_dist::to_torch_dist;
pub use tracker::{TRACKER, Tracked, write_tracker};
pub use verify::{verify, verify_opened};
pub use writer::{MegatronForm, MegatronWriter, MegatronWriterBuilder};
