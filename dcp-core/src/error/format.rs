//! Errors of parsers: bytes that do not have the form of their format.

use std::fmt;

use super::Source;
use crate::text::{Message, Quoted};

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

    /// Adds the place of the problem, in bytes from the beginning of the file, or of what was being
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

    /// Adds the name of the tensor or value that was being read.
    #[must_use]
    pub fn of_item(mut self, fqn: &str) -> Self {
        self.problem = format!("{}: {}", Quoted(fqn), self.problem).into_boxed_str();
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The part of the checkpoint that was being read.
    #[must_use]
    pub fn what(&self) -> &str {
        &self.what
    }

    /// The problem of that part.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// The file concerned, where known.
    #[must_use]
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// The place of the problem, in bytes.
    #[must_use]
    pub fn byte_offset(&self) -> Option<u64> {
        self.byte_offset
    }
}

impl fmt::Display for FormatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "bad {}", Message(&self.what))?;
        if let Some(file) = &self.file {
            write!(f, " in {}", Quoted(file))?;
        }
        if let Some(offset) = self.byte_offset {
            write!(f, " at byte {offset}")?;
        }
        write!(f, ": {}", Message(&self.problem))
    }
}
