//! Jobs that read checkpoints without writing one: inspect, verify, compare.

pub mod diff;
pub mod get;
pub mod inspect;
pub mod report;
pub mod stats;
pub mod verify;
