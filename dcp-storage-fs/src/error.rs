//! Classifies errors of the file system.

use std::io;

use dcp_core::error::StorageOp;
use dcp_core::{Key, StorageError, StorageErrorKind};
use rustix::io::Errno;

/// Classifies an error of an operation on `key`.
pub(crate) fn on_key(op: StorageOp, key: &Key) -> impl Fn(io::Error) -> StorageError {
    move |error| classify(op, Some(key), error)
}

pub(crate) fn classify(op: StorageOp, key: Option<&Key>, error: io::Error) -> StorageError {
    let of = |kind, why: &str| StorageError::new(kind, op, key.cloned()).with_message(why);
    match Errno::from_io_error(&error) {
        Some(Errno::XDEV) => {
            let why = "a symbolic link leads out of the folder; `follow_links` allows that";
            of(StorageErrorKind::Link, why).with_source(error)
        }
        Some(Errno::LOOP) => {
            let why = "a symbolic link is in the way; `follow_links` allows that";
            of(StorageErrorKind::Link, why).with_source(error)
        }
        Some(Errno::NOTDIR) => {
            let why = "a parent of its path is not a folder";
            of(StorageErrorKind::Invalid, why).with_source(error)
        }
        Some(Errno::ISDIR | Errno::NOTEMPTY) => is_folder(op, key).with_source(error),
        _ => StorageError::from_io(op, key.cloned(), error),
    }
}

/// The error of writing an object where a folder is.
pub(crate) fn is_folder(op: StorageOp, key: Option<&Key>) -> StorageError {
    StorageError::new(StorageErrorKind::Invalid, op, key.cloned())
        .with_message("a folder has this name")
}

/// Whether the error says that the file, or a folder on the way to it, does not exist.
pub(crate) fn is_absence(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::NOTDIR))
}
