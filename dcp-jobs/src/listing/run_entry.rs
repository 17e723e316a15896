//! A checkpoint in a directory, as a listing shows it.

use std::fmt;

use dcp_core::format::FormatInfo;
use serde::Serialize;

/// A checkpoint in a directory.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunEntry {
    /// Its file or folder.
    pub name: String,
    /// The format that it belongs to.
    pub kind: EntryKind,
    /// Whether it is complete, judged by names, lengths and small indexes;
    /// `None` when not all of them were seen, or could be.
    pub complete: Option<bool>,
    /// The reason that it is not whole.
    pub problem: Option<String>,
    /// The files that have the problem, where its format neither names nor owns any of them. The checkpoint itself is
    /// whole and [counts](Self::is_complete) as that, although `complete` is unknown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub strays: Vec<String>,
    /// The number that its name ends in, of steps as a rule.
    pub step: Option<u64>,
    /// Whether the trainer may remove it when a later one is there, where it says so.
    pub ephemeral: Option<bool>,
    /// The version of the program that wrote it, where it says so.
    pub version: Option<String>,
    /// Files below it.
    pub files: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// The time of the last of them, in seconds since 1970, if the storage has it.
    pub modified: Option<u64>,
    /// The path to open to read it, relative to the directory; `None` where nothing can be read.
    pub checkpoint: Option<String>,
}

impl RunEntry {
    /// Whether all is there that its format needs.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.complete == Some(true) || !self.strays.is_empty()
    }
}

/// The format of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct EntryKind {
    /// The name of the format.
    format: &'static str,
    title: &'static str,
    /// Whether the entry is one file.
    is_file: bool,
}

impl EntryKind {
    pub(super) fn of(format: FormatInfo, is_file: bool) -> Self {
        Self { format: format.name, title: format.title, is_file }
    }

    /// The name of the format, such as `olmo`.
    #[must_use]
    pub fn format(self) -> &'static str {
        self.format
    }

    /// Whether the entry is one file, and no folder.
    #[must_use]
    pub fn is_file(self) -> bool {
        self.is_file
    }
}

impl fmt::Display for EntryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.title, if self.is_file { " file" } else { "" })
    }
}

impl Serialize for EntryKind {
    /// The name of the format, which ends in `_file` for a single file: `torch_save_file`.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.is_file {
            return serializer.collect_str(&format_args!("{}_file", self.format));
        }
        serializer.serialize_str(self.format)
    }
}
