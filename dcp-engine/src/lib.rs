#![doc = include_str!("../README.md")]
//!
//! The engine brings a planner, a format and a group of ranks together and names none of them by
//! name. A save goes: every rank plans, the coordinator merges the plans and gives every byte its
//! place, every rank writes, and when all have succeeded the coordinator commits. A load goes:
//! every rank looks at the index and plans, and when all have found that it fits, every rank
//! reads. Whatever fails anywhere, every rank of the group returns, with the same error.
//!
//! [`Saver`] and [`Loader`] are the whole protocol, with [`Settings`] that they share; [`AppState`] expands things with a state of
//! their own; [`BackgroundSaver`] saves a copy that a [`Stager`] makes, while training goes on;
//! [`CheckpointObserver`] receives the steps of all of them; [`BroadcastReader`] lets one rank read
//! for all, [`ParallelReader`] lets each read a share for all.

mod background;
mod cast;
pub mod device;
mod disjoint;
pub mod event;
mod group;
mod load;
mod memory;
mod messages;
mod metadata_lookup;
mod packed;
mod read_sharing;
mod rounds;
mod save;
mod settings;
mod sink;
mod small_values;
mod source;
pub mod stage;
mod stateful;
pub mod summary;

pub use background::{BackgroundSaver, SaveHandle, SaveProgress, SaveStage, WhenBusy};
pub use cast::Casts;
pub use dcp_cast::{CastCounts, CastReport, TensorCast};
pub use event::{CheckpointEvent, CheckpointObserver};
pub use group::Group;
pub use load::{LoadSummary, Loader};
pub use read_sharing::{BroadcastReader, Exchange, ParallelReader, ReadSharing};
pub use save::Saver;
pub use settings::{LoadMode, Settings};
pub use stage::{StagedState, Stager};
pub use stateful::AppState;
pub use summary::SaveSummary;
