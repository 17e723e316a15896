//! The small files of a checkpoint and of a run, and what they say.

pub(crate) mod config;
pub(crate) mod file_hashes;
pub(crate) mod manifest;
pub(crate) mod recovery;
pub(crate) mod tracker;
