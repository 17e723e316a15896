#![doc = include_str!("../README.md")]
//!
//! The author of a [`Storage`](dcp_core::Storage), a [`Collective`](dcp_core::Collective), a
//! planner or a [`CheckpointFormat`](dcp_core::format::CheckpointFormat) tests it here: every
//! clause of the trait's documentation is a named test.
//!
//! The binary accepts the arguments of `cargo test`, filters included. [`run`] combines several
//! suites in one binary; [`passes`] runs one within a test. A clause that the plug-in's capabilities
//! exclude appears as ignored, with the missing capability; a clause that takes longer than
//! [`CASE_TIMEOUT`] fails. New clauses come with minor versions of this crate.
//!
//! For tests of code that *uses* a plug-in: [`MemoryStorage`], and decorators that count, slow
//! down, stop and fail: [`CountingStorage`], [`SlowStorage`], [`StallStorage`], [`FaultStorage`],
//! [`WebStorage`], [`FaultWriter`], [`SlowCollective`] and [`FaultCollective`]. The feature `http`
//! adds the module `http`: a proxy that injects faults into HTTP connections, and a double of Google
//! Cloud Storage.

mod case;
pub mod collective;
mod counting_storage;
mod fault_collective;
mod fault_storage;
mod fault_writer;
pub mod format;
#[cfg(feature = "http")]
pub mod http;
mod memory_storage;
mod numbers;
pub mod planner;
mod slow_collective;
mod slow_storage;
mod stall_storage;
pub mod storage;
mod web_storage;

pub use case::{CASE_TIMEOUT, passes, run};
pub use counting_storage::{CountingStorage, Counts};
pub use fault_collective::{CollectiveFault, FaultCollective};
pub use fault_storage::{Effect, Fault, FaultStorage};
pub use fault_writer::FaultWriter;
pub use libtest_mimic::Trial;
pub use memory_storage::MemoryStorage;
pub use slow_collective::SlowCollective;
pub use slow_storage::SlowStorage;
pub use stall_storage::StallStorage;
pub use web_storage::WebStorage;
