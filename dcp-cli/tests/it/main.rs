//! The real binary on real checkpoints.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail loudly")]

mod adapters;
mod callables;
mod claimed_targets;
mod combine;
mod complete;
mod convert;
mod copy;
mod copy_whole;
mod damaged;
mod deepspeed;
mod diff;
mod errors;
mod get;
mod hf;
mod hostile;
mod incomplete_save;
mod incomplete_sources;
mod index_and_headers;
mod inspect;
mod interrupt;
mod key_options;
#[cfg(unix)]
mod kills;
mod links;
mod look;
mod matrix;
mod megatron;
mod megatron_beside;
mod megatron_convert;
mod megatron_damaged;
mod memory;
mod model_folder;
mod one_answer;
mod overlap;
mod plugins;
mod prune;
#[cfg(unix)]
mod prune_keeps;
#[cfg(unix)]
mod prune_verifies;
mod quantized;
mod rank_files;
mod ranks;
mod ranks_bucket;
mod ranks_compare;
mod ranks_places;
mod ranks_write;
mod report;
mod reshard;
mod rewrite_metadata;
mod run_directory;
mod secrets;
mod shells;
mod sidecar;
mod special_files;
mod stated_config;
mod stats;
mod stray_files;
mod stray_names;
mod support;
mod terminal;
mod torch_save;
mod trace;
mod unshard;
mod values;
mod wrong_input;
