//! Remains of uploads that did not finish.

use std::time::SystemTime;

use crate::error::StorageOp;

/// The remains of an unfinished upload, from [`Storage::leftovers`](super::Storage::leftovers).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leftover {
    /// The kind of leftover.
    pub kind: LeftoverKind,
    /// The path of a temporary file, or the key of the object that an open upload would have become,
    /// below the root of the storage. It is text from the storage, and not a [`Key`](crate::Key): a
    /// temporary file has none.
    pub path: String,
    /// Its length in bytes, if the storage says it.
    pub byte_len: Option<u64>,
    /// The time of its last write, or at which the upload began, if the storage says it.
    pub modified: Option<SystemTime>,
}

impl Leftover {
    /// A leftover at a path, of unknown length and age.
    #[must_use]
    pub fn new(kind: LeftoverKind, path: impl Into<String>) -> Self {
        Self { kind, path: path.into(), byte_len: None, modified: None }
    }

    /// Adds the length in bytes.
    #[must_use]
    pub fn with_byte_len(mut self, byte_len: Option<u64>) -> Self {
        self.byte_len = byte_len;
        self
    }

    /// Adds the time.
    #[must_use]
    pub fn with_modified(mut self, modified: Option<SystemTime>) -> Self {
        self.modified = modified;
        self
    }
}

/// The kinds of a [`Leftover`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LeftoverKind {
    /// A file, or an object of an object store, under a name that no key has.
    TemporaryFile,
    /// An upload that the storage holds open, with its parts.
    OpenUpload,
}

/// The treatment of leftovers that [`Storage::leftovers`](super::Storage::leftovers) finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeftoverAction {
    /// Returns the leftovers.
    List,
    /// Removes the leftovers, and returns those that were removed.
    Remove,
}

impl LeftoverAction {
    /// The operation to name in an error.
    #[must_use]
    pub fn op(self) -> StorageOp {
        match self {
            Self::List => StorageOp::ListLeftovers,
            Self::Remove => StorageOp::RemoveLeftovers,
        }
    }
}
