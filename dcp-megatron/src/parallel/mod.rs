//! Fully parallel saves: the replicas of a model share the work of writing it.
//!
//! Without it, the ranks that hold main replicas (data-parallel rank 0, as a rule) write everything
//! and the others nothing. With it, the ranks of a parallelization group, usually those of one
//! data-parallel group with its context-parallel ranks, agree on one writer for every shard that
//! has its main replica among them ([`distribute`]), and replica ids are set accordingly
//! ([`ParallelSave`]). Everything after that is an ordinary save.
//!
//! A fully parallel load needs no sharded state dict: [`dcp_engine::ParallelReader`] shares what
//! ranks read beneath the planner. Megatron-Core always shares; here a load that measures that each rank
//! is faster by itself does not, unless [`ReadSharing::Always`] is set.
//!
//! ```
//! # use std::sync::Arc;
//! # use dcp_conformance::MemoryStorage;
//! # use dcp_core::{Collective, DType, Storage, TensorView, HostMemory};
//! use dcp_megatron::parallel::{ParallelReader, ParallelSave};
//! use dcp_megatron::sharded::{ShardedStateDict, ShardedTensor};
//! use dcp_megatron::{MegatronLoadOptions, MegatronSaveOptions, load, save};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), dcp_megatron::MegatronError> {
//! # let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
//! # let group = || dcp_collectives::LocalCollective::group(1).pop().map(Arc::new);
//! # let (Some(world), Some(replicas)) = (group(), group()) else { return Ok(()) };
//! # let (world, replicas): (Arc<dyn Collective>, Arc<dyn Collective>) = (world, replicas);
//! # let (rank, dp_rank) = (0, 0);
//! # let data = TensorView::contiguous(HostMemory::zeroed(64), DType::Float32, [4, 4], 0)?;
//! let weight = ShardedTensor::from_rank_offsets("weight", data).replica_id((0, 0, dp_rank)).build()?;
//! let state = ShardedStateDict::from([("weight", weight)]);
//!
//! // One for all saves of the process.
//! let share = Arc::new(ParallelSave::new(Arc::clone(&replicas)).world_rank(rank));
//! let options = MegatronSaveOptions::new().group(Arc::clone(&world)).distribution(share);
//! save(&state, &storage, &options).await?;
//!
//! let options = MegatronLoadOptions::new().group(world).reader(move |inner| {
//!     Arc::new(ParallelReader::new(inner, Arc::clone(&replicas)).world_rank(rank))
//! });
//! load(&state, &storage, &options).await?;
//! # Ok(())
//! # }
//! ```

mod cache;
mod distribution;
mod inventory;
mod save;

pub use crate::save::SaveDistribution;
pub use cache::CachedDistribution;
pub use dcp_engine::{Exchange, ParallelReader, ReadSharing};
pub use dcp_planner::ShareRule;
pub use distribution::{Distribution, Purpose, distribute};
pub use inventory::Inventory;
pub use save::{DistributionOrigin, ParallelSave, Redistribution};
