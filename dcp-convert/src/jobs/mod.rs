//! Jobs that copy checkpoints, or read them without writing one: inspect, verify, compare.

pub mod copy;
pub mod diff;
pub mod get;
pub mod inspect;
pub mod report;
mod sidecar_summary;
pub mod stats;
pub mod verify;
