//! Pictures of checkpoints in text. Pure: values in, text out.

mod canvas;
mod files;
mod grid;
mod nest;
pub(crate) mod problems;
pub(crate) mod run;
pub(crate) mod shards;
pub(crate) mod tree;
pub(crate) mod value;
