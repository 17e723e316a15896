#![doc = include_str!("../README.md")]
//!
//! The engine brings a planner, a format and a group of ranks together and knows none of them by
//! name. A save goes: every rank plans, the coordinator merges the plans and gives every byte its
//! place, every rank writes, and when all have succeeded the coordinator commits. A load goes:
//! every rank looks at the index and plans, and when all have found that it fits, every rank
//! reads. Whatever fails anywhere, every rank of the group returns, with the same error.
//!
//! [`Saver`] and [`Loader`] are the whole protocol; [`AppState`] expands things with a state of
//! their own; [`BackgroundSaver`] saves a copy while training goes on; [`BroadcastReader`] lets one
//! rank read for all, [`ParallelReader`] lets each read a share for all.

mod background;
mod broadcast;
mod cast;
mod disjoint;
mod division;
mod exchange_message;
mod group;
mod load;
mod memory;
mod messages;
mod parallel;
mod planned;
mod receiver;
mod save;
mod sink;
mod source;
mod stateful;

pub use background::{BackgroundSaver, PendingSave, StagedState};
pub use broadcast::BroadcastReader;
pub use cast::Casts;
pub use dcp_cast::{CastCounts, CastReport, TensorCast};
pub use group::Group;
pub use load::{LoadMode, LoadSummary, Loader};
pub use parallel::{Exchange, ParallelReader};
pub use save::{SaveSummary, Saver};
pub use stateful::AppState;
