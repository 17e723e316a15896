//! The small files of a checkpoint and of a run: their names and formats.

pub(crate) mod common_state;
pub(crate) mod config;
pub(crate) mod file_hashes;
pub(crate) mod manifest;
pub(crate) mod recovery;
pub(crate) mod small_file;
pub(crate) mod tracker;

pub use common_state::{COMMON_FILE, COMMON_OBJECT, COMMON_STATE, CommonPlace};
pub use config::{Backend, CheckpointingConfig, METADATA_JSON};
pub use file_hashes::INTEGRITY_FILE;
pub use manifest::{Manifest, verify_integrity, write_integrity};
pub use recovery::{HALF_REPLACED, recovered};
pub use tracker::TRACKER;
