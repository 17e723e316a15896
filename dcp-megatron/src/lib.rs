//! Checkpoints of [Megatron-Core](https://github.com/NVIDIA/Megatron-LM): its sharded state
//! dicts, its save and load, and every age of its on-disk formats, without Megatron.

mod agreement;
mod args;
mod async_queue;
mod checkpoint;
mod common;
mod common_check;
mod config;
mod describe;
mod error;
mod fitting;
mod flattened;
mod load;
mod logical;
pub mod optimizer;
pub mod parallel;
pub mod partition;
mod prepare;
mod request;
mod run;
mod save;
pub mod sharded;
mod strategy;
mod strict;
mod to_torch_dist;
mod tracker;
mod writer;
mod zarr;

pub use args::MegatronArgs;
pub use async_queue::{AsyncCallsQueue, AsyncRequest};
pub use checkpoint::{MegatronCheckpoint, MegatronFormat, OpenOptions};
pub use common::{COMMON_FILE, COMMON_OBJECT, CommonPlace};
pub use common_check::{CommonDifference, CommonDiffers};
pub use config::{Backend, CheckpointingConfig, METADATA_JSON};
pub use describe::{Description, Layers, ObjectGroup, ParallelSizes, object_key};
pub use error::MegatronError;
pub use load::{LoadOptions, Loaded, load};
pub use logical::COMMON_STATE;
pub use partition::ParallelLayout;
pub use run::{MegatronRun, RunCheckpoint};
pub use save::{MegatronBackgroundSaver, SaveDistribution, SaveOptions, async_save, save};
pub use strategy::{LoadStrategy, Opened, SaveStrategy, Strategies, WriterSettings};
pub use strict::{KeyMismatch, StrictHandling, UnknownStrictHandling};
pub use to_torch_dist::to_torch_dist;
pub use tracker::{TRACKER, Tracked, write_tracker};
pub use writer::{MegatronForm, MegatronWriter, MegatronWriterBuilder};
