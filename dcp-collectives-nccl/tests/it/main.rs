//! Groups over a network whose ranks are threads.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../fake/mod.rs"]
mod fake;
mod groups;
mod loads;
#[cfg(feature = "nccl")]
mod nccl;
