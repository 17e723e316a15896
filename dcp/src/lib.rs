#![doc = include_str!("../README.md")]
//!
//! A checkpoint of any format, by its URL:
//!
//! ```no_run
//! use dcp::{DType, Format};
//!
//! # async fn example() -> Result<(), dcp::jobs::Error> {
//! let run = dcp::open("runs/step_1000").await?;
//! let model = run.convert("my-model").to(Format::HuggingFace).dtype(DType::BFloat16).run().await?;
//! let verdict = run.verify().deep(true).run().await?;
//! println!("{} tensors of a checkpoint, whole: {}", model.report.tensors, verdict.ok);
//! # Ok(())
//! # }
//! ```
//!
//! A trainer keeps a [`Checkpointer`], with the [`Settings`] of its group, storages and formats. It
//! saves and loads any [`Stateful`] value, also in the background:
//!
//! ```
//! use std::sync::Arc;
//!
//! use dcp::{Checkpointer, Collective, DType, Settings, StateDict};
//!
//! # fn example(
//! #     group: Arc<dyn Collective>,
//! #     mut state: StateDict,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! // Of processes: `Arc::new(dcp::collectives::TcpConfig::from_env()?.connect()?)`.
//! let settings = Settings::in_group(group).cast(DType::BFloat16);
//! let checkpointer = Checkpointer::with_settings(settings);
//! checkpointer.load(&mut state, "runs/step_1000").blocking()?;
//! let saving = checkpointer.save(&state, "runs/step_2000").background()?;
//! // ... training goes on ...
//! dcp::block_on(saving.wait())??;
//! # Ok(())
//! # }
//! ```
//!
//! The crates behind it can be used on their own: [`core`] for the vocabulary and the traits that
//! plug-ins implement, [`planner`] for geometry and policy, [`formats`] for the bytes,
//! [`engine`] for the protocols. With their features, `jobs` has whole checkpoints by URL and every job
//! on them, `megatron`, `olmo`, `peft` and `deepspeed` what these frameworks save and load, `mapping` their weights
//! as Hugging Face has them, `state` the state dicts of models and optimizers.
//!
//! # Features
//!
//! | feature | default | what it brings |
//! |---|---|---|
//! | `fs` | yes | checkpoints on a file system: `file://` URLs and plain paths |
//! | `s3`, `gcs`, `azure` | no | checkpoints in Amazon S3 and stores that speak its protocol, Google Cloud Storage, Azure Blob Storage |
//! | `http` | no | reading checkpoints from web servers |
//! | `memory` | no | checkpoints in the memory of the process: `memory://` URLs |
//! | `object-storage` | no | any `ObjectStore` of the `object_store` crate as a storage |
//! | `cache` | yes | a cache of remote storages on local disk, and turns to upload, for the processes of a node |
//! | `trace` | yes | traces of saves and loads: phases, files and requests of every rank, which Perfetto opens |
//! | `collectives` | yes | groups of ranks: threads of one process, or processes over TCP |
//! | `tls` | no | mutual TLS between ranks over TCP |
//! | `jobs` | yes | whole checkpoints by URL: open, inspect, verify, get, diff, stats, convert, reshard, average, merge, copy, report, and the [`manager`] of a run; brings no framework |
//! | `olmo` | yes | OLMo-core's runs, optimizer layouts and checkpoint functions; brings `jobs` |
//! | `megatron` | yes | Megatron-Core's checkpoints of every age, its sharded state dicts, its save and load; brings `jobs` |
//! | `mapping` | yes | mappings of weights between Megatron-Core's names and Hugging Face's; brings `jobs` |
//! | `peft` | yes | adapters of PEFT, and their merge into base models; brings `jobs` |
//! | `deepspeed` | yes | checkpoints of DeepSpeed as whole tensors; brings `jobs` |
//! | `trainers` | yes | folders with a file for each rank, of verl, SkyRL, accelerate and torch's `_experimental`; brings `jobs` |
//! | `state` | yes | state dicts of models and optimizers as `torch.distributed.checkpoint.state_dict` makes them |
//! | `blocking` | yes | the API for callers without a runtime |
//! | `zstd` | yes | reading and writing items through PyTorch's zstd extension |
//! | `safetensors-crate` | no | tensors of the `safetensors` crate in a state dict, and the reverse, without a copy |

#[cfg(feature = "blocking")]
mod block_on;
pub mod checkpointer;
#[cfg(feature = "jobs")]
pub mod manager;
pub mod plugins;
mod storages;

#[cfg(feature = "collectives")]
pub use dcp_collectives as collectives;
pub use dcp_core as core;
#[cfg(feature = "deepspeed")]
pub use dcp_deepspeed as deepspeed;
pub use dcp_engine as engine;
pub use dcp_formats as formats;
#[cfg(feature = "jobs")]
pub use dcp_jobs as jobs;
#[cfg(feature = "mapping")]
pub use dcp_mapping as mapping;
#[cfg(feature = "megatron")]
pub use dcp_megatron as megatron;
#[cfg(feature = "olmo")]
pub use dcp_olmo as olmo;
#[cfg(feature = "peft")]
pub use dcp_peft as peft;
pub use dcp_planner as planner;
#[cfg(feature = "state")]
pub use dcp_state as state;
#[cfg(feature = "cache")]
pub use dcp_storage_cache as cache;
#[cfg(feature = "fs")]
pub use dcp_storage_fs as fs;
#[cfg(feature = "object-storage")]
pub use dcp_storage_object as object_storage;
#[cfg(feature = "trainers")]
pub use dcp_trainers as trainers;

#[cfg(feature = "trace")]
pub use dcp_trace as trace;

#[cfg(feature = "blocking")]
pub use block_on::block_on;
pub use checkpointer::Checkpointer;
pub use dcp_core::registry::StorageRegistry;
pub use dcp_core::{
    CheckpointError, Collective, DType, Region, Shard, StateDict, Stateful, Storage, Tensor, Value,
};
pub use dcp_engine::{AppState, LoadMode, Settings};
#[cfg(feature = "jobs")]
pub use dcp_jobs::{Checkpoint, Format, Opener};
pub use storages::default_storages;
#[cfg(feature = "fs")]
pub use storages::storages_following_links;

/// The examples of the README compile.
#[cfg(all(doctest, feature = "blocking", feature = "fs"))]
#[doc = include_str!("../../README.md")]
struct Readme;

/// So do those of the guides.
#[cfg(all(doctest, feature = "blocking", feature = "fs", feature = "jobs"))]
#[doc = include_str!("../../docs/guides/resume-training.md")]
struct Guides;

/// Saves `state` to `url` from this process alone, in PyTorch's format.
///
/// Await it, or call [`blocking`](checkpointer::Save::blocking) or
/// [`background`](checkpointer::Save::background). A [`Checkpointer`] saves in a group of ranks,
/// and has other storages, planners and formats.
///
/// ```
/// # async fn example(state: dcp::StateDict) -> Result<(), dcp::CheckpointError> {
/// dcp::save(&state, "runs/step_1000").await?;
/// # Ok(())
/// # }
/// ```
pub fn save<S: Stateful + ?Sized>(state: &S, url: impl Into<String>) -> checkpointer::Save {
    Checkpointer::new().save(state, url)
}

/// Loads `url` into `state`, in this process alone: tensors in place, objects by replacing them.
///
/// Await it, or call [`blocking`](checkpointer::Load::blocking). [`Checkpointer`] has options.
///
/// ```
/// use dcp::LoadMode;
///
/// # async fn example(mut state: dcp::StateDict) -> Result<(), dcp::CheckpointError> {
/// dcp::load(&mut state, "runs/step_1000").mode(LoadMode::Partial).await?;
/// # Ok(())
/// # }
/// ```
pub fn load<S: Stateful + Send + ?Sized>(
    state: &mut S,
    url: impl Into<String>,
) -> checkpointer::Load<'_, S> {
    Checkpointer::new().load(state, url)
}

/// Opens the checkpoint at a URL, of any format: a directory, a run of them, or a file.
///
/// [`Opener`] has options: a rank, a variant, other storages, a listener for notes.
///
/// # Errors
///
/// When there is nothing, no checkpoint, or one that cannot be read.
#[cfg(feature = "jobs")]
pub async fn open(url: &str) -> Result<Checkpoint, jobs::Error> {
    opener(default_storages()).open(url).await
}

/// An opener of what these storages serve, with the formats and frameworks of this build.
///
/// ```no_run
/// # async fn example() -> Result<(), dcp::jobs::Error> {
/// let opener = dcp::opener(dcp::default_storages()).on_note(|note| eprintln!("note: {note}"));
/// let checkpoint = opener.open("runs/step_1000").await?;
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "jobs")]
#[must_use]
pub fn opener(storages: StorageRegistry) -> Opener {
    let (formats, frameworks) = (plugins::default_formats(), plugins::default_frameworks());
    Opener::new(storages).formats(formats).frameworks(frameworks)
}
