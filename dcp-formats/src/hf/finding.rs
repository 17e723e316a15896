//! What is wrong with a folder.

use std::sync::Arc;

use dcp_core::{FormatError, Key};

/// One thing that is wrong with a folder of safetensors files.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The kind.
    pub kind: FindingKind,
    /// The tensor.
    pub fqn: Option<Arc<str>>,
    /// The file.
    pub file: Option<Key>,
    /// What is wrong, in words.
    pub message: String,
}

/// What kind of thing is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// A file that the index names, or the names of other files count, does not exist.
    MissingFile,
    /// The index that the names of the files promise does not exist.
    MissingIndex,
    /// A writer died while it replaced the model.
    Unfinished,
    /// The header of a file cannot be read.
    Header,
    /// A file ends before one of its tensors.
    ShortFile,
    /// A file has bytes that belong to no tensor.
    ExtraBytes,
    /// Two tensors of a file share bytes.
    SharedBytes,
    /// The index places a tensor in a file that does not hold it.
    NotInFile,
    /// A tensor is in two files, and nothing says that these are parts of it.
    Twice,
    /// The parts of a tensor do not fit together.
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

    /// The finding as an error about `what`, when there are `others` besides.
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
