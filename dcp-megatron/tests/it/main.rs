//! Checkpoints of Megatron-Core, real ones and our own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail loudly")]

mod async_aborted;
mod async_queue;
mod bucket_space;
mod contents;
mod corpus;
mod damaged_common;
mod describing;
mod expected;
mod fixtures;
mod fixtures_loaded;
mod hostile_shards;
mod legacy;
mod legacy_files;
mod legacy_fused;
mod opening;
mod optimizer;
mod overwrites;
mod parallel;
mod plugged;
mod ranks;
mod remove;
mod resharding;
mod save_load;
mod saved_again;
mod savers;
mod saving;
mod select_checkpoint;
mod sharing;
mod small_model;
mod strictness;
mod support;
mod targets;
mod to_torch_dist;
mod together;
mod traps;
mod verifying;
mod writer;
mod zarr;
