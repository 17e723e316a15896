//! Fully parallel saves: the replicas of a model share the work of writing it.
//!
//! Without it, the ranks that hold main replicas (data-parallel rank 0, as a rule) write everything
//! and the others nothing. With it, the ranks of a parallelization group, usually those of one
//! data-parallel group with its context-parallel ranks, agree on one writer for every shard that
//! has its main replica among them ([`distribute`]), and replica ids are set accordingly
//! ([`ParallelSave`]). Everything after that is an ordinary save.
//!
//! A fully parallel load needs no sharded state dict: [`dcp_engine::ParallelReader`] shares what
//! ranks read beneath the planner.

mod cache;
mod distribution;
mod inventory;
mod save;

pub use dcp_engine::{Exchange, ParallelReader};
pub use dcp_planner::ShareRule;
pub use distribution::{Distribution, Purpose, distribute};
pub use inventory::Inventory;
pub use save::{DistributionOrigin, ParallelSave, Redistribution};
