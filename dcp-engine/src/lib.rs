#![doc = include_str!("../README.md")]
//!
//! The engine brings a planner, a format and a group of ranks together and names none of them by
//! name. A save goes: every rank plans, the coordinator merges the plans and gives every byte its
//! place, every rank writes, and when all have succeeded the coordinator commits. A load goes:
//! every rank looks at the index and plans, and when all have found that it fits, every rank
//! reads. Whatever fails anywhere, every rank of the group returns, with the same error.
//!
//! [`Saver`] and [`Loader`] are the whole protocol; [`AppState`] expands things with a state of
//! their own; [`BackgroundSaver`] saves a copy that a [`Stager`] makes, while training goes on;
//! [`CheckpointObserver`] receives the steps of all of them; [`BroadcastReader`] lets one rank read
//! for all, [`ParallelReader`] lets each read a share for all.

mod assignment;
mod background;
mod broadcast;
mod cast;
pub mod device;
mod disjoint;
mod division;
pub mod event;
mod exchange_message;
mod group;
mod kept;
mod load;
mod machine;
mod measured_speeds;
mod memory;
mod messages;
mod needs;
mod offer;
mod packed;
mod parallel;
mod planned;
mod read_ahead;
mod read_sharing;
mod receiver;
mod rounds;
mod save;
mod sink;
mod small_values;
mod source;
pub mod stage;
mod stateful;
pub mod summary;

pub use background::{BackgroundSaver, SaveHandle, SaveProgress, SaveStage, WhenBusy};
pub use broadcast::BroadcastReader;
pub use cast::Casts;
pub use dcp_cast::{CastCounts, CastReport, TensorCast};
pub use event::{CheckpointEvent, CheckpointObserver};
pub use group::Group;
pub use load::{LoadMode, LoadSummary, Loader};
pub use parallel::ParallelReader;
pub use read_sharing::{Exchange, ReadSharing};
pub use save::Saver;
pub use stage::{StagedState, Stager};
pub use stateful::AppState;
pub use summary::SaveSummary;
