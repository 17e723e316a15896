//! One error type per layer, each saying what was tried, on what, and what to do next.

use std::fmt;

use crate::key::{InvalidKey, Key};

type Source = Box<dyn std::error::Error + Send + Sync>;

/// What kind of trouble a storage had, so that callers can decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StorageErrorKind {
    /// There is no such object.
    NotFound,
    /// There is such an object already.
    AlreadyExists,
    /// No permission.
    Denied,
    /// The storage is full, or a quota is.
    Full,
    /// The object ends before the requested byte.
    Truncated,
    /// The storage cannot do this.
    Unsupported,
    /// The request makes no sense, such as a bad key or URL.
    Invalid,
    /// Trying again may help.
    Transient,
    /// Anything else.
    Other,
}

/// What a storage was doing.
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

    /// Adds what the kind alone does not say.
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

    /// What kind of trouble it was.
    #[must_use]
    pub fn kind(&self) -> StorageErrorKind {
        self.kind
    }

    /// What was being done.
    #[must_use]
    pub fn op(&self) -> StorageOp {
        self.op
    }

    /// The object concerned.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Whether the same call may succeed later.
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
            StorageErrorKind::Full => "the storage is full",
            StorageErrorKind::Truncated => "it ends too early",
            StorageErrorKind::Unsupported => "this storage cannot do that",
            StorageErrorKind::Invalid => "the request is invalid",
            StorageErrorKind::Transient => "the storage did not answer",
            StorageErrorKind::Other => "the storage failed",
        };
        write!(f, ": {reason}")?;
        if let Some(message) = &self.message {
            write!(f, " ({message})")?;
        }
        Ok(())
    }
}

impl From<InvalidKey> for StorageError {
    fn from(error: InvalidKey) -> Self {
        Self::new(StorageErrorKind::Invalid, StorageOp::Open, None).with_source(error)
    }
}

/// Bytes do not have the form they should have.
///
/// Never a panic, never an allocation beyond what the input really holds.
#[derive(Debug, thiserror::Error)]
pub struct FormatError {
    what: Box<str>,
    problem: Box<str>,
    file: Option<Box<str>>,
    byte_offset: Option<u64>,
    #[source]
    source: Option<Source>,
}

impl FormatError {
    /// `what` was being read (such as "pickle" or "zip directory") when `problem` was found.
    #[must_use]
    pub fn new(what: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            what: what.into().into_boxed_str(),
            problem: problem.into().into_boxed_str(),
            file: None,
            byte_offset: None,
            source: None,
        }
    }

    /// Adds where the problem lies, in bytes from the beginning of the file, or of what was being
    /// read while no file is known.
    #[must_use]
    pub fn at(mut self, byte_offset: u64) -> Self {
        self.byte_offset = Some(byte_offset);
        self
    }

    /// Adds the file, and moves a known offset from the start of the item to that of the file.
    #[must_use]
    pub fn in_file(mut self, file: impl Into<String>, item_start: u64) -> Self {
        if self.file.is_none() {
            self.file = Some(file.into().into_boxed_str());
            self.byte_offset = Some(self.byte_offset.unwrap_or(0).saturating_add(item_start));
        }
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What was being read.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// What is wrong with it.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// The file concerned, where known.
    #[must_use]
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// Where the problem lies, in bytes.
    #[must_use]
    pub fn byte_offset(&self) -> Option<u64> {
        self.byte_offset
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bad {}", self.what)?;
        if let Some(file) = &self.file {
            write!(f, " in {file:?}")?;
        }
        if let Some(offset) = self.byte_offset {
            write!(f, " at byte {offset}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

/// A rank of a group, as the group counts.
pub type Rank = u32;

/// A plan cannot be made, or makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Two paths of the state dict flatten to the same name.
    #[error("two entries of the state dict flatten to {fqn:?}; rename one of them")]
    DuplicateFqn {
        /// The name.
        fqn: String,
    },
    /// Ranks describe one tensor differently.
    #[error("{fqn:?} is {left} on rank {left_rank} but {right} on rank {right_rank}")]
    Disagreement {
        /// The tensor or object.
        fqn: String,
        /// What one rank says.
        left: String,
        /// The rank that says it.
        left_rank: Rank,
        /// What another rank says.
        right: String,
        /// That other rank.
        right_rank: Rank,
    },
    /// A chunk lies partly outside its tensor.
    #[error("{fqn:?} has shape {shape}, but a chunk of rank {rank:?} lies at {chunk}")]
    OutOfBounds {
        /// The tensor.
        fqn: String,
        /// Its shape.
        shape: String,
        /// The chunk.
        chunk: String,
        /// Whose chunk it is, where known.
        rank: Option<Rank>,
    },
    /// Two chunks share elements.
    #[error("{fqn:?} has overlapping chunks {first} and {second}")]
    Overlap {
        /// The tensor.
        fqn: String,
        /// One chunk.
        first: String,
        /// The other.
        second: String,
    },
    /// The chunks leave elements out.
    #[error("the chunks of {fqn:?} hold {found} of its {expected} elements")]
    Uncovered {
        /// The tensor.
        fqn: String,
        /// Elements of the tensor.
        expected: u64,
        /// Elements of all chunks together.
        found: u64,
    },
    /// The memory of a shard does not have the size that its region says.
    #[error("shard {region} of {fqn:?} needs {expected} bytes, its memory has {found}")]
    ShardMemory {
        /// The tensor.
        fqn: String,
        /// The shard's region.
        region: String,
        /// Bytes that region and dtype call for.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// Something that cannot be saved or loaded.
    #[error("{fqn:?} cannot be planned: {problem}")]
    Unsupported {
        /// The tensor or object.
        fqn: String,
        /// Why not, and what to do.
        problem: String,
    },
    /// Bytes that are no plan of this version.
    #[error("bad plan on the wire: {problem}")]
    Wire {
        /// What is wrong with it.
        problem: String,
    },
    /// Several problems at once.
    #[error("{}", list(.0))]
    Many(Vec<PlanError>),
}

fn list(errors: &[PlanError]) -> String {
    const SHOWN: usize = 10;
    let mut text = errors.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>();
    if errors.len() > SHOWN {
        text.push(format!("and {} more", errors.len() - SHOWN));
    }
    text.join("; ")
}

/// Ranks cannot talk to each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A peer died, left, or closed its connection.
    #[error("rank {rank} is gone during {op}: {message}")]
    PeerLost {
        /// The peer.
        rank: Rank,
        /// What was being done.
        op: &'static str,
        /// How that was noticed.
        message: String,
    },
    /// A peer did not answer in time.
    #[error("rank {rank} did not answer within {deadline:?} in {op}")]
    Timeout {
        /// The peer waited for.
        rank: Rank,
        /// What was being done.
        op: &'static str,
        /// The deadline.
        deadline: std::time::Duration,
    },
    /// Some rank gave up and told the others.
    #[error("rank {rank} aborted the group: {reason}")]
    Aborted {
        /// Who gave up.
        rank: Rank,
        /// Why.
        reason: String,
    },
    /// Ranks are at different operations, or talk different versions.
    #[error("rank {rank} is out of step in {op}: {message}")]
    Mismatch {
        /// The peer.
        rank: Rank,
        /// What this rank was doing.
        op: &'static str,
        /// What the peer did.
        message: String,
    },
    /// The group could not be formed.
    #[error("cannot form the group: {message}")]
    Rendezvous {
        /// What went wrong and what to check.
        message: String,
    },
}

/// The step of a save or load in which something failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// Looking at the storage, before anything else.
    Open,
    /// Making plans.
    Plan,
    /// Writing data.
    Write,
    /// Making the new checkpoint visible.
    Commit,
    /// Reading data.
    Read,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Plan => "plan",
            Self::Write => "write",
            Self::Commit => "commit",
            Self::Read => "read",
        })
    }
}

/// Why a checkpoint could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A file is not what it should be.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// There is no sound plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The ranks lost each other.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// What was asked for and what is stored do not agree.
    #[error("the checkpoint does not fit the state dict: {summary}")]
    Mismatch {
        /// The first few differences in words.
        summary: String,
    },
    /// Memory of a tensor cannot be used now.
    #[error("cannot use the memory of {fqn:?}")]
    Memory {
        /// The tensor.
        fqn: String,
        /// Why not.
        #[source]
        source: crate::memory::LoanError,
    },
    /// There is no checkpoint here.
    #[error("{message}")]
    NotACheckpoint {
        /// What there is instead, and where a checkpoint is if one is near.
        message: String,
    },
    /// Ranks failed; every rank of the group gets this same report.
    #[error("{phase} failed on {}", failing_ranks(.failures))]
    Ranks {
        /// The step.
        phase: Phase,
        /// Each failing rank and what it said.
        failures: Vec<RankFailure>,
    },
    /// The caller asked to stop.
    #[error("canceled")]
    Canceled,
}

/// What one rank reported.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankFailure {
    /// The rank, as the group counts.
    pub rank: Rank,
    /// Its error, with the chain of causes.
    pub message: String,
}

impl RankFailure {
    /// `rank` failed with `message`.
    #[must_use]
    pub fn new(rank: Rank, message: impl Into<String>) -> Self {
        Self { rank, message: message.into() }
    }
}

fn failing_ranks(failures: &[RankFailure]) -> String {
    const SHOWN: usize = 8;
    let mut text = failures
        .iter()
        .take(SHOWN)
        .map(|failure| format!("rank {}: {}", failure.rank, failure.message))
        .collect::<Vec<_>>();
    if failures.len() > SHOWN {
        text.push(format!("and {} more ranks", failures.len() - SHOWN));
    }
    text.join("; ")
}

/// An error and its causes in one line, as it is sent to other ranks and printed.
#[must_use]
pub fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_stay_small() {
        assert!(size_of::<StorageError>() <= 96);
        assert!(size_of::<FormatError>() <= 96);
    }

    /// T19: PyTorch's `CheckpointException` is a `BaseException`, which `except Exception` misses.
    #[test]
    fn t19_errors_are_ordinary_errors() {
        fn through_any_handler() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            let failure = RankFailure::new(3, "disk full");
            Err(CheckpointError::Ranks { phase: Phase::Write, failures: vec![failure] })?
        }
        let error = through_any_handler().unwrap_err();
        assert_eq!(error.to_string(), "write failed on rank 3: disk full");
    }

    #[test]
    fn a_format_error_moves_into_its_file_once() {
        let error = FormatError::new("pickle", "memo bomb").at(5).in_file("a", 100).in_file("b", 7);
        assert_eq!(error.to_string(), "bad pickle in \"a\" at byte 105: memo bomb");
    }
}
