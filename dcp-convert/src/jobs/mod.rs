//! Jobs that read checkpoints without writing one: inspect, verify, compare.

pub(crate) mod diff;
pub(crate) mod get;
pub(crate) mod inspect;
pub mod report;
pub(crate) mod stats;
pub(crate) mod verify;
