//! Distributed model checkpoints, in PyTorch's own on-disk format, from Rust.
//!
//! ```
//! use dcp::{DType, StateDict, Tensor};
//!
//! # let dir = tempfile::tempdir()?;
//! # let url = dir.path().join("step_1").display().to_string();
//! let mut state = StateDict::new();
//! state.insert("weight", Tensor::replicated(DType::Float32, [2, 2], vec![1; 16])?);
//! state.insert("step", 1);
//! dcp::blocking::save(&state, &url)?;
//!
//! let mut restored = StateDict::new();
//! restored.insert("weight", Tensor::zeros(DType::Float32, [2, 2])?);
//! restored.insert("step", 0);
//! dcp::blocking::load(&mut restored, &url)?;
//! assert!(restored.get("weight").unwrap().same(state.get("weight").unwrap()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A checkpoint of any format, by its URL:
//!
//! ```no_run
//! use dcp::{DType, Format};
//!
//! # async fn example() -> Result<(), dcp::checkpoint::Error> {
//! let run = dcp::open("runs/step_1000").await?;
//! let model = run.convert("my-model").to(Format::HuggingFace).dtype(DType::BFloat16).run().await?;
//! let verdict = run.verify().deep(true).run().await?;
//! println!("{} tensors of a checkpoint, whole: {}", model.report.tensors, verdict.ok);
//! # Ok(())
//! # }
//! ```
//!
//! In a group of ranks, [`Saver`] and [`Loader`] take a [`Collective`]; other formats are other
//! [`StorageWriter`]s and [`StorageReader`]s.
//!
//! The crates behind it can be used on their own: [`core`] for the vocabulary and the traits that
//! plug-ins implement, [`planner`] for geometry and policy, [`formats`] for the bytes,
//! [`engine`] for the protocols. With their features, `convert` has offline jobs on whole
//! checkpoints, `megatron` and `olmo` what these frameworks save and load, `mapping` their weights
//! as Hugging Face has them, `checkpoint` all of it by URL.
//!
//! # Features
//!
//! | feature | default | what it brings |
//! |---|---|---|
//! | `fs` | yes | checkpoints on a file system: `file://` URLs and plain paths |
//! | `collectives` | yes | groups of ranks: threads of one process, or processes over TCP |
//! | `convert` | yes | offline jobs: inspect, verify, get, diff, stats, convert, reshard, average, merge, report |
//! | `olmo` | yes | OLMo-core's runs, optimizer layouts and checkpoint functions |
//! | `megatron` | yes | Megatron-Core's checkpoints of every age, its sharded state dicts, its save and load |
//! | `checkpoint` | yes | whole checkpoints of any format by URL: open, verify, convert, merge, average, reshard; brings `convert`, `olmo`, `megatron` and `mapping` |
//! | `mapping` | yes | mappings of weights between Megatron-Core's names and Hugging Face's |
//! | `blocking` | yes | the API for callers without a runtime |
//! | `zstd` | yes | reading checkpoints saved through PyTorch's zstd extension |

#[cfg(feature = "blocking")]
pub mod blocking;
mod default_formats;
mod storages;

#[cfg(feature = "checkpoint")]
pub use dcp_checkpoint as checkpoint;
#[cfg(feature = "collectives")]
pub use dcp_collectives as collectives;
#[cfg(feature = "convert")]
pub use dcp_convert as convert;
pub use dcp_core as core;
pub use dcp_engine as engine;
pub use dcp_formats as formats;
#[cfg(feature = "mapping")]
pub use dcp_mapping as mapping;
#[cfg(feature = "megatron")]
pub use dcp_megatron as megatron;
#[cfg(feature = "olmo")]
pub use dcp_olmo as olmo;
pub use dcp_planner as planner;
#[cfg(feature = "fs")]
pub use dcp_storage_fs as fs;

#[cfg(feature = "checkpoint")]
pub use dcp_checkpoint::{Checkpoint, Format, Opener};
#[cfg(feature = "collectives")]
pub use dcp_collectives::{LocalCollective, TcpCollective};
pub use dcp_core::{
    Access, CheckpointError, Collective, DType, HostMemory, Key, Region, Shard, StateDict,
    Stateful, Storage, StorageReader, StorageRegistry, StorageWriter, Tensor, Value,
};
pub use dcp_engine::{
    AppState, BackgroundSaver, BroadcastReader, LoadMode, LoadSummary, Loader, ParallelReader,
    SaveSummary, Saver,
};
pub use dcp_formats::dcp::{DcpReader, DcpWriter};
pub use default_formats::default_formats;
pub use storages::default_storages;
#[cfg(feature = "fs")]
pub use storages::storages_following_links;

/// The examples of the README compile.
#[cfg(all(doctest, feature = "blocking", feature = "fs"))]
#[doc = include_str!("../../README.md")]
struct Readme;

/// Saves `state` to `url` from this process alone, in PyTorch's format.
///
/// # Errors
///
/// When the place cannot be written or the state cannot be saved; the place then holds what it
/// held before.
pub async fn save(state: &StateDict, url: &str) -> Result<SaveSummary, CheckpointError> {
    let storage = default_storages().open(url, Access::Write)?;
    Saver::new().save(state, &DcpWriter::new(storage)).await
}

/// Loads `url` into `state`, in this process alone: tensors in place, objects by replacing them.
///
/// # Errors
///
/// When there is no checkpoint, it is damaged, or it does not hold all that `state` asks for.
pub async fn load(state: &mut StateDict, url: &str) -> Result<LoadSummary, CheckpointError> {
    let storage = default_storages().open(url, Access::Read)?;
    Loader::new().load(state, &DcpReader::new(storage)).await
}

/// Opens the checkpoint at a URL, of any format: a directory, a run of them, or a file.
///
/// [`Opener`] has options: a rank, a variant, other storages, a listener for notes.
///
/// # Errors
///
/// When there is nothing, no checkpoint, or one that cannot be read.
#[cfg(feature = "checkpoint")]
pub async fn open(url: &str) -> Result<Checkpoint, checkpoint::Error> {
    Opener::new(default_storages()).open(url).await
}
