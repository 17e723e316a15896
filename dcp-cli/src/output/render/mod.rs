//! Renders reports as text, without I/O.

mod canvas;
pub(crate) mod diff;
mod files;
mod grid;
pub(crate) mod megatron;
mod nest;
mod number;
pub(crate) mod plugin;
pub(crate) mod problems;
pub(crate) mod prune;
pub(crate) mod run;
pub(crate) mod shards;
mod spark;
pub(crate) mod stats;
pub(crate) mod trace;
pub(crate) mod tree;
pub(crate) mod value;
mod wrap;
