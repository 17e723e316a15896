//! Problems of a folder of safetensors files.

use std::sync::Arc;

use dcp_core::{FormatError, Key};

/// A problem of a folder of safetensors files.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The kind.
    pub kind: FindingKind,
    /// The tensor, if the problem concerns one.
    pub fqn: Option<Arc<str>>,
    /// The file, if the problem concerns one.
    pub file: Option<Key>,
    /// A description.
    pub message: String,
}

/// Kinds of problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// A file in the index, or counted by other files' names, does not exist.
    MissingFile,
    /// The index that the file names imply does not exist.
    MissingIndex,
    /// The index cannot be read.
    Index,
    /// A writer died while it replaced the model.
    Unfinished,
    /// The header of a file cannot be read.
    Header,
    /// A file ends before one of its tensors.
    ShortFile,
    /// A file has bytes outside its tensors.
    ExtraBytes,
    /// Two tensors of a file share bytes.
    SharedBytes,
    /// The index places a tensor in a file that does not hold it.
    NotInFile,
    /// A tensor is in two files that do not declare parts of it.
    Twice,
    /// The parts of a tensor overlap or leave gaps.
    Parts,
}

impl Finding {
    pub(super) fn new(kind: FindingKind, message: impl Into<String>) -> Self {
        Self { kind, fqn: None, file: None, message: message.into() }
    }

    pub(super) fn of(mut self, fqn: &Arc<str>) -> Self {
        self.fqn = Some(Arc::clone(fqn));
        self
    }

    pub(super) fn within(mut self, file: &Key) -> Self {
        self.file = Some(file.clone());
        self
    }

    /// The finding as an error about `what`, with `others` further findings.
    pub(super) fn into_error(self, what: &'static str, others: usize) -> FormatError {
        let mut problem = match &self.fqn {
            Some(fqn) => format!("{fqn:?}: {}", self.message),
            None => self.message,
        };
        if others > 0 {
            problem.push_str(&format!(" (and {others} more problems)"));
        }
        let error = FormatError::new(what, problem);
        match self.file {
            Some(file) => error.in_file(file.as_str(), 0),
            None => error,
        }
    }
}
