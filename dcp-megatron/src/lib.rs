#![doc = include_str!("../README.md")]
//!
//! | Megatron-Core | here |
//! |---|---|
//! | `dist_checkpointing.save`, `load` | [`save`], [`load`] |
//! | `ShardedTensor`, `ShardedObject`, `ShardedTensorFactory` | [`sharded`] |
//! | `FullyParallelSaveStrategyWrapper`, `FullyParallelLoadStrategyWrapper` | [`parallel`] |
//! | `AsyncCallsQueue`, `AsyncRequest` | [`async_save`], [`AsyncCallsQueue`] |
//! | `StrictHandling` | [`StrictHandling`] |
//! | strategies and their registry | [`strategy`] |
//! | `load_common_state_dict`, `load_tensors_metadata`, `load_plain_tensors` | [`contents`] |
//! | `latest_checkpointed_iteration.txt` | [`MegatronRun`], [`write_tracker`] |
//! | `DistributedOptimizer` | [`optimizer`] |
//!
//! # Offline jobs
//!
//! [`MegatronCheckpoint`] opens what any version wrote, the folder of a run included: `torch_dist`,
//! zarr, and the `mp_rank_*` folders of `--ckpt-format torch`. What it shows is whole tensors
//! under the keys of today, and every job of [`dcp_jobs`] takes it.
//!
//! # Saving and loading
//!
//! A trainer describes its state as a [`sharded::ShardedStateDict`], and all ranks [`save`] it and
//! [`load`] it in whatever layout they have. What a rank has of a tensor is cut by an offset and
//! a number of parts for each axis; everything else in the dict is the common state.
//!
//! ```
//! use std::sync::Arc;
//!
//! use dcp_core::{DType, HostMemory, Storage, TensorView, Value};
//! use dcp_megatron::sharded::{LocalTensor, ShardedStateDict, ShardedTensor};
//! use dcp_megatron::{MegatronLoadOptions, MegatronSaveOptions, load, save};
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
//!     // A part of a tensor of all layers, which has one axis more.
//!     let weight = ShardedTensor::from_rank_offsets("layers.weight", weight)
//!         .prepended_axes(1)
//!         .offset(0, layer, 2)
//!         .build()?;
//!     state.insert(format!("layer{layer}"), weight);
//! }
//! state.insert("iteration", Value::Int(10));
//! save(&state, &storage, &MegatronSaveOptions::new()).await?;
//!
//! let both = LocalTensor::described(DType::Float32, [2, 2, 2]);
//! let both = ShardedTensor::from_rank_offsets("layers.weight", both).build()?;
//! let request = ShardedStateDict::from([("layers", both)]);
//! let loaded = load(&request, &storage, &MegatronLoadOptions::new()).await?.state;
//! assert_eq!(loaded.get("iteration").and_then(Value::as_int), Some(10));
//! let layers = loaded.get("layers").and_then(Value::as_tensor).and_then(|t| t.to_vec());
//! assert_eq!(layers, Some([[0; 16], [1; 16]].concat()));
//! # Ok(())
//! # }
//! ```
//!
//! Ranks talk through a [`Collective`](dcp_core::Collective) of [`MegatronSaveOptions::group`] and
//! [`MegatronLoadOptions::group`]. Before the first byte is written, it is checked that all their shards
//! make whole tensors; what fails on one rank is the same error on all.
//!
//! # Replicas share the work
//!
//! Without more, the ranks with the main replicas write everything and each rank reads what it
//! needs. With [`parallel::ParallelSave`] and [`parallel::ParallelReader`], every byte is written
//! and read once in a group of replicas, in shares of about the same size (a large load on ranks that
//! are faster alone reads on each, unless [`parallel::ReadSharing::Always`] is set):
//!
//! ```
//! # use std::sync::Arc;
//! # use dcp_core::Collective;
//! use dcp_megatron::parallel::{ParallelReader, ParallelSave};
//! use dcp_megatron::{MegatronLoadOptions, MegatronSaveOptions};
//!
//! # fn example(world: Arc<dyn Collective>, replicas: Arc<dyn Collective>, rank: u32) {
//! // One for all saves of the process.
//! let share = ParallelSave::new(Arc::clone(&replicas)).world_rank(rank);
//! let save = MegatronSaveOptions::new().group(Arc::clone(&world)).distribution(Arc::new(share));
//!
//! let load = MegatronLoadOptions::new().group(world).reader(move |inner| {
//!     Arc::new(ParallelReader::new(inner, Arc::clone(&replicas)).world_rank(rank))
//! });
//! # }
//! ```
//!
//! # Asynchronous saves
//!
//! [`async_save`] returns when the state is copied. An [`AsyncCallsQueue`] finalizes saves in their
//! order, on all ranks, so that the tracker never names a checkpoint that is not there:
//!
//! ```
//! # use std::sync::Arc;
//! # use dcp_conformance::MemoryStorage;
//! # use dcp_core::{Storage, Value};
//! use dcp_megatron::sharded::ShardedStateDict;
//! use dcp_megatron::{AsyncCallsQueue, AsyncRequest, MegatronBackgroundSaver, MegatronSaveOptions, Tracked, async_save, write_tracker};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), dcp_megatron::MegatronError> {
//! # let run: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
//! # let folder: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
//! # let state = ShardedStateDict::from([("iteration", Value::Int(10))]);
//! let background = MegatronBackgroundSaver::new(None);
//! let mut queue = AsyncCallsQueue::new(None);
//!
//! let save = async_save(&state, &folder, &MegatronSaveOptions::new(), &background).await?;
//! let mut request = AsyncRequest::started(save);
//! let tracker = Arc::clone(&run);
//! request.add_finalize_fn(async move || write_tracker(&*tracker, Tracked::Iteration(10)).await);
//! queue.schedule_async_request(request).await?;
//!
//! // Once an iteration:
//! queue.maybe_finalize(false).await?;
//! // And in the end:
//! queue.close().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Custom strategies
//!
//! What writes and reads a backend of some version is looked up in [`Strategies`](strategy::Strategies). A plug-in adds
//! to them, or replaces what is there:
//!
//! ```
//! use std::num::NonZeroUsize;
//! use std::sync::Arc;
//!
//! use dcp_core::{Storage, StorageWriter};
//! use dcp_formats::dcp::FileLayout;
//! use dcp_megatron::{MegatronError, MegatronWriter, MegatronSaveOptions};
//! use dcp_megatron::disk::Backend;
//! use dcp_megatron::strategy::{SaveStrategy, Strategies, WriterSettings};
//!
//! /// Two files of each rank, whatever the options say.
//! #[derive(Debug)]
//! struct TwoFiles;
//!
//! impl SaveStrategy for TwoFiles {
//!     fn writer(
//!         &self,
//!         storage: &Arc<dyn Storage>,
//!         settings: WriterSettings,
//!     ) -> Result<Arc<dyn StorageWriter>, MegatronError> {
//!         let files = NonZeroUsize::MIN.saturating_add(1);
//!         let writer = MegatronWriter::builder(Arc::clone(storage))
//!             .common(settings.common)
//!             .overwrite(settings.overwrite)
//!             .files(FileLayout::SplitBySize(files));
//!         Ok(Arc::new(writer.build()))
//!     }
//! }
//!
//! let backend = Backend::first("torch_dist");
//! let strategies = Strategies::default().with_save(backend.clone(), Arc::new(TwoFiles));
//! let options = MegatronSaveOptions::new().strategy(strategies, backend);
//! ```

mod agreement;
mod args;
pub mod contents;
pub mod disk;
pub mod error;
pub mod framework;
pub mod jobs;
mod layout;
mod load;
mod object_grids;
mod open;
pub mod optimizer;
pub mod parallel;
pub mod partition;
mod save;
pub mod sharded;
mod writer;

pub use args::MegatronArgs;
pub use disk::tracker::Tracked;
pub use error::MegatronError;
pub use jobs::verify::verify;
pub use load::strict::StrictHandling;
pub use load::{Loaded, MegatronLoadOptions, load};
pub use open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions, StoredFormat};
pub use open::format::MegatronCoreFormat;
pub use open::run::{MegatronRun, RunCheckpoint, write_tracker};
pub use open::strategy;
pub use save::async_queue::{AsyncCallsQueue, AsyncRequest};
pub use save::{MegatronBackgroundSaver, MegatronSaveOptions, async_save, save};
pub use writer::{MegatronForm, MegatronWriter, MegatronWriterBuilder};
