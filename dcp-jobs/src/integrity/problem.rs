//! Problems of a checkpoint.

use std::sync::Arc;

use dcp_core::error::error_chain;
use dcp_core::format::{FoundKind, FoundProblem};
use dcp_core::{CheckpointError, CheckpointMetadata, StorageErrorKind};
use serde::{Deserialize, Serialize};

use crate::read::stored_items::Placed;

/// A problem of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Problem {
    /// The kind.
    pub kind: ProblemKind,
    /// The tensor or object, if the problem concerns one.
    pub key: Option<Arc<str>>,
    /// The file, if the problem concerns one.
    pub file: Option<String>,
    /// The offset in the file at which the problem begins.
    pub byte_offset: Option<u64>,
    /// A description.
    pub message: String,
}

/// Kinds of problems.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProblemKind {
    /// The index contradicts itself.
    #[default]
    Index,
    /// A chunk is partly outside its tensor.
    OutOfBounds,
    /// Two chunks hold the same elements.
    Overlap,
    /// Elements that no chunk holds.
    Uncovered,
    /// A file does not exist.
    MissingFile,
    /// A file is shorter than the index requires.
    ShortFile,
    /// A file's length differs from its length at commit.
    ChangedFile,
    /// Two items claim the same bytes of a file.
    SharedBytes,
    /// Bytes differ from their checksum, or cannot be decoded.
    Corrupt,
    /// Python would run commands or code when it loads the checkpoint.
    Callable,
    /// A file in the folder of the checkpoint is damaged that its format neither names nor owns.
    StrayFile,
}

impl ProblemKind {
    /// Whether a problem of this kind is one with what the format of the checkpoint reads. What Python would run, and
    /// files of others, leave every byte of the checkpoint as it was saved.
    #[must_use]
    pub fn is_damage(self) -> bool {
        !matches!(self, Self::Callable | Self::StrayFile)
    }
}

impl Problem {
    pub(crate) fn new(kind: ProblemKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), ..Self::default() }
    }

    pub(crate) fn at(mut self, metadata: &CheckpointMetadata, item: &Placed) -> Self {
        self.key = Some(Arc::clone(&item.fqn));
        self.file = metadata.file(item.placement.file).map(ToString::to_string);
        self.byte_offset = Some(item.placement.byte_offset);
        self
    }
}

impl From<FoundProblem> for Problem {
    fn from(found: FoundProblem) -> Self {
        let kind = match found.kind {
            FoundKind::MissingFile | FoundKind::Unfinished => ProblemKind::MissingFile,
            FoundKind::ShortFile => ProblemKind::ShortFile,
            FoundKind::ChangedFile => ProblemKind::ChangedFile,
            FoundKind::SharedBytes => ProblemKind::SharedBytes,
            FoundKind::Corrupt => ProblemKind::Corrupt,
            _ => ProblemKind::Index,
        };
        Self {
            kind,
            key: found.key,
            file: found.file.map(|file| file.to_string()),
            byte_offset: found.byte_offset,
            message: found.message,
        }
    }
}

/// Classifies a failure on one item: a problem of the checkpoint, or an error of the machine.
pub(crate) fn judge(
    error: CheckpointError,
    metadata: &CheckpointMetadata,
    item: &Placed,
) -> Result<Problem, CheckpointError> {
    let kind = match &error {
        CheckpointError::Storage(storage) => match storage.kind() {
            StorageErrorKind::NotFound => ProblemKind::MissingFile,
            StorageErrorKind::Truncated => ProblemKind::ShortFile,
            _ => return Err(error),
        },
        CheckpointError::Format(_) | CheckpointError::Plan(_) => ProblemKind::Corrupt,
        _ => return Err(error),
    };
    // The problem has these fields of its own.
    let message = match &error {
        CheckpointError::Format(error) => format!("bad {}: {}", error.what(), error.problem()),
        other => error_chain(other),
    };
    let mut problem = Problem::new(kind, message).at(metadata, item);
    if let CheckpointError::Format(format) = &error
        && let (Some(_), Some(offset)) = (format.file(), format.byte_offset())
    {
        problem.byte_offset = Some(offset);
    }
    Ok(problem)
}
