//! Checkpoints of [Megatron-Core](https://github.com/NVIDIA/Megatron-LM): its sharded state
//! dicts, its save and load, and every age of its on-disk formats, without Megatron.

mod args;
mod async_queue;
mod checkpoint;
mod common;
mod config;
mod describe;
mod error;
mod flattened;
mod logical;
pub mod optimizer;
pub mod parallel;
pub mod partition;
mod run;
pub mod sharded;
mod to_torch_dist;
mod tracker;
mod writer;
mod zarr;

pub use args::MegatronArgs;
pub use async_queue::{AsyncCallsQueue, AsyncRequest};
pub use checkpoint::{MegatronCheckpoint, MegatronFormat, OpenOptions};
pub use common::{COMMON_FILE, COMMON_OBJECT, CommonPlace};
pub use config::{Backend, CheckpointingConfig, METADATA_JSON};
pub use describe::{Description, Layers, ObjectGroup, ParallelSizes, object_key};
pub use error::MegatronError;
pub use logical::COMMON_STATE;
pub use partition::ParallelLayout;
pub use run::{MegatronRun, RunCheckpoint};
pub use to_torch_dist::to_torch_dist;
pub use tracker::{TRACKER, Tracked, write_tracker};
pub use writer::{MegatronForm, MegatronWriter, MegatronWriterBuilder};
