//! Folders that only their user can change.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use dcp_core::error::StorageOp;
use dcp_core::{StorageError, StorageErrorKind};

/// Creates a folder, if it is missing, that other users cannot read.
pub(crate) fn create(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Creates a folder, if it is missing, and refuses one that another user owns or can write to.
pub(crate) fn open(path: &Path) -> Result<(), StorageError> {
    let failed = |error| {
        StorageError::from_io(StorageOp::Open, None, error)
            .with_message(format!("the folder {}", path.display()))
    };
    create(path).map_err(failed)?;
    let metadata = fs::metadata(path).map_err(failed)?;
    let own = rustix::process::geteuid().as_raw();
    if metadata.uid() == own && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(StorageError::new(StorageErrorKind::Denied, StorageOp::Open, None).with_message(format!(
        "the folder {} belongs to another user or others can write to it; choose a folder of your \
         own, or run chmod go-w on it",
        path.display()
    )))
}
