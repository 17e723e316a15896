//! Errors of OpenDAL as those of a storage.

use std::error::Error as _;
use std::io;

use dcp_core::error::StorageOp;
use dcp_core::{Key, StorageError, StorageErrorKind};
use opendal::ErrorKind;

/// The kind decides what a caller does: whether it repeats a request, and the exit code of `dcp`.
fn kind(error: &opendal::Error) -> StorageErrorKind {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory => {
            StorageErrorKind::NotFound
        }
        ErrorKind::AlreadyExists | ErrorKind::ConditionNotMatch => StorageErrorKind::AlreadyExists,
        ErrorKind::PermissionDenied => StorageErrorKind::Denied,
        ErrorKind::RangeNotSatisfied => StorageErrorKind::Truncated,
        ErrorKind::Unsupported => StorageErrorKind::Unsupported,
        ErrorKind::ConfigInvalid => StorageErrorKind::Invalid,
        _ if is_no_file(error) => StorageErrorKind::NotFound,
        _ if error.is_temporary() => StorageErrorKind::Transient,
        _ => StorageErrorKind::Other,
    }
}

/// Whether there is a folder instead of the object, or an object instead of its folder.
fn is_no_file(error: &opendal::Error) -> bool {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let kind = source.map(io::Error::kind);
    matches!(kind, Some(io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory))
}

/// An error of a request for `key`.
pub(crate) fn storage_error(
    op: StorageOp,
    key: Option<&Key>,
    error: opendal::Error,
) -> StorageError {
    StorageError::new(kind(&error), op, key.cloned()).with_source(error)
}

/// An error without a request.
pub(crate) fn refused(kind: StorageErrorKind, op: StorageOp, key: &Key) -> StorageError {
    StorageError::new(kind, op, Some(key.clone()))
}
