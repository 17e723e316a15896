//! Errors of storages.

use std::fmt;

use super::Source;
use crate::names::key::{InvalidKey, Key};
use crate::text::Message;

/// The kind of a storage's failure, for callers to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StorageErrorKind {
    /// There is no such object.
    NotFound,
    /// There is such an object already.
    AlreadyExists,
    /// No permission.
    Denied,
    /// The credentials are missing, wrong or expired.
    Credentials,
    /// The bucket or container does not exist.
    NoBucket,
    /// The storage is full, or a quota is.
    Full,
    /// The object ends before the requested byte.
    Truncated,
    /// The object is longer than the caller or the storage allows.
    TooLarge,
    /// The object was replaced while it was read.
    Changed,
    /// The storage cannot do this.
    Unsupported,
    /// The request makes no sense, such as a bad key or URL.
    Invalid,
    /// A link leads to where the storage may not follow it.
    Link,
    /// Another writer holds the object or has replaced it meanwhile.
    Conflict,
    /// Trying again may help.
    Transient,
    /// Anything else.
    Other,
}

/// The operation of a storage that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the methods of `Storage` and `Upload`")]
pub enum StorageOp {
    Open,
    Stat,
    Read,
    Put,
    Upload,
    List,
    Delete,
    Claim,
    ListLeftovers,
    RemoveLeftovers,
    RemoveFolders,
}

impl fmt::Display for StorageOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Stat => "stat",
            Self::Read => "read",
            Self::Put => "write",
            Self::Upload => "upload",
            Self::List => "list",
            Self::Delete => "delete",
            Self::Claim => "claim",
            Self::ListLeftovers => "list leftovers of",
            Self::RemoveFolders => "remove empty folders in",
            Self::RemoveLeftovers => "remove leftovers of",
        })
    }
}

/// A storage operation failed.
#[derive(Debug, thiserror::Error)]
pub struct StorageError {
    kind: StorageErrorKind,
    op: StorageOp,
    key: Option<Key>,
    message: Option<Box<str>>,
    #[source]
    source: Option<Source>,
}

impl StorageError {
    /// An error of `kind` in `op` on `key`.
    #[must_use]
    pub fn new(kind: StorageErrorKind, op: StorageOp, key: Option<Key>) -> Self {
        Self { kind, op, key, message: None, source: None }
    }

    /// Classifies an I/O error.
    #[must_use]
    pub fn from_io(op: StorageOp, key: Option<Key>, error: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match error.kind() {
            Io::NotFound => StorageErrorKind::NotFound,
            Io::AlreadyExists => StorageErrorKind::AlreadyExists,
            Io::PermissionDenied | Io::ReadOnlyFilesystem => StorageErrorKind::Denied,
            Io::StorageFull | Io::QuotaExceeded | Io::FileTooLarge => StorageErrorKind::Full,
            Io::UnexpectedEof => StorageErrorKind::Truncated,
            Io::Unsupported => StorageErrorKind::Unsupported,
            Io::InvalidInput | Io::InvalidFilename => StorageErrorKind::Invalid,
            Io::Interrupted | Io::TimedOut | Io::WouldBlock => StorageErrorKind::Transient,
            _ => StorageErrorKind::Other,
        };
        Self::new(kind, op, key).with_source(error)
    }

    /// Adds a message with details that the kind does not have.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = Some(message.into().into_boxed_str());
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The kind of failure.
    #[must_use]
    pub fn kind(&self) -> StorageErrorKind {
        self.kind
    }

    /// The operation that failed.
    #[must_use]
    pub fn op(&self) -> StorageOp {
        self.op
    }

    /// The object concerned.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Whether the same call may succeed when it is repeated: [`StorageErrorKind::Transient`] only.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.kind == StorageErrorKind::Transient
    }
}

impl fmt::Display for StorageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}", self.op)?;
        if let Some(key) = &self.key {
            write!(f, " {key:?}")?;
        }
        let reason = match self.kind {
            StorageErrorKind::NotFound => "it does not exist",
            StorageErrorKind::AlreadyExists => "it exists already",
            StorageErrorKind::Denied => "permission denied",
            StorageErrorKind::Credentials => "the credentials are missing, wrong or expired",
            StorageErrorKind::NoBucket => "the bucket does not exist",
            StorageErrorKind::Full => "the storage is full",
            StorageErrorKind::Truncated => "it ends too early",
            StorageErrorKind::TooLarge => "it is too large",
            StorageErrorKind::Changed => "it changed while it was read",
            StorageErrorKind::Unsupported => "this storage cannot do that",
            StorageErrorKind::Invalid => "the request is invalid",
            StorageErrorKind::Link => "a link is not followed",
            StorageErrorKind::Conflict => "another writer is at work on it",
            StorageErrorKind::Transient => "the storage did not answer",
            StorageErrorKind::Other => "the storage failed",
        };
        write!(f, ": {reason}")?;
        if let Some(message) = &self.message {
            write!(f, " ({})", Message(message))?;
        }
        Ok(())
    }
}

impl From<InvalidKey> for StorageError {
    fn from(error: InvalidKey) -> Self {
        Self::new(StorageErrorKind::Invalid, StorageOp::Open, None).with_source(error)
    }
}
