//! Folders that only their user can change.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use dcp_core::error::StorageOp;
use dcp_core::{StorageError, StorageErrorKind};

/// Creates a folder, if it is missing, that other users cannot read.
pub(crate) fn create(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Creates a folder in one that only this user can change, and refuses a link, another kind of file, and a
/// folder that another user owns or can write to.
pub(crate) fn create_within(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        created => return created,
    }
    let metadata = fs::symlink_metadata(path)?;
    if metadata.is_dir() && is_own(&metadata) {
        return Ok(());
    }
    let problem = "it is a link or no folder, belongs to another user, or others can write to it";
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

fn is_own(metadata: &Metadata) -> bool {
    let own = rustix::process::geteuid().as_raw();
    metadata.uid() == own && metadata.mode() & 0o022 == 0
}

/// Creates a folder, if it is missing, and refuses one that another user owns or can write to.
pub(crate) fn open(path: &Path) -> Result<(), StorageError> {
    let failed = |error| {
        StorageError::from_io(StorageOp::Open, None, error)
            .with_message(format!("the folder {}", path.display()))
    };
    create(path).map_err(failed)?;
    if is_own(&fs::metadata(path).map_err(failed)?) {
        return Ok(());
    }
    Err(StorageError::new(StorageErrorKind::Denied, StorageOp::Open, None).with_message(format!(
        "the folder {} belongs to another user or others can write to it; choose a folder of your \
         own, or run chmod go-w on it",
        path.display()
    )))
}
