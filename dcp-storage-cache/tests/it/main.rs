//! What the storages of a node add to the storage below them.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

mod cache;
mod throttle;
