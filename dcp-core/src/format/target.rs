//! The interface of a format that jobs write.

use std::fmt;
use std::sync::Arc;

use super::listing::Folder;
use super::stream_transform::StreamTransform;
use crate::error::CheckpointError;
use crate::plans::metadata::CheckpointMetadata;
use crate::protocol::checkpoint::StorageWriter;
use crate::storages::storage::Storage;

/// A format whose checkpoints can be written: folders, of which any number of ranks write files.
///
/// A [`CheckpointFormat`](super::CheckpointFormat) returns it from
/// [`target`](super::CheckpointFormat::target). Before a job writes, it compares the folder with
/// every registered format: an [`Occupant`] of a format that is not in [`parts`](Self::parts)
/// refuses the write. [`existing`](Self::existing) decides about the others.
pub trait CheckpointTarget: fmt::Debug + Send + Sync {
    /// The formats that make up a checkpoint of this format: its own name, and the names of the
    /// formats that it builds on.
    fn parts(&self) -> &'static [&'static str];

    /// Finds the files of these formats in `folder`. `metadata` is the index, where one of the formats can
    /// read it.
    fn existing(&self, folder: &Folder<'_>, metadata: Option<&CheckpointMetadata>) -> Existing;

    /// Whether the writer applies [`WriterOptions::compression`]. Jobs refuse to compress what is
    /// written in other formats.
    fn compresses(&self) -> bool;

    /// The writer of a checkpoint in `storage`, for a job that has a place for everything that the
    /// format needs.
    ///
    /// # Errors
    ///
    /// When the format cannot be written with these options.
    fn writer(
        &self,
        storage: Arc<dyn Storage>,
        options: &WriterOptions,
    ) -> Result<Arc<dyn StorageWriter>, CheckpointError>;
}

/// Options to write a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriterOptions {
    /// Whether an existing checkpoint is replaced. Otherwise it is an error.
    pub overwrite: bool,
    /// The compression of data; none by default.
    pub compression: Option<Compression>,
}

/// The compression of a checkpoint's data, or another transform of its stored items.
#[derive(Clone)]
#[non_exhaustive]
pub enum Compression {
    /// With zstd, at a level from 1 (fastest) to 22 (smallest), or a negative one.
    Zstd(i32),
    /// Through a transform of a plug-in. Whoever reads the checkpoint
    /// [registers](super::FormatRegistry::with_transform) the same one.
    Transform(Arc<dyn StreamTransform>),
}

impl Compression {
    /// zstd at level 3, its usual one.
    pub const ZSTD: Self = Self::Zstd(3);
}

impl PartialEq for Compression {
    /// Transforms are equal where they are one object, since those of one name may have other keys.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Zstd(a), Self::Zstd(b)) => a == b,
            (Self::Transform(a), Self::Transform(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

impl Eq for Compression {}

impl fmt::Debug for Compression {
    // A transform may hold a key, and jobs compare this text among their ranks.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zstd(level) => f.debug_tuple("Zstd").field(level).finish(),
            Self::Transform(of) => write!(f, "Transform({}/{})", of.name(), of.version()),
        }
    }
}

impl WriterOptions {
    /// Sets whether the write replaces a checkpoint, or refuses to.
    #[must_use]
    pub fn with_overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Sets the compression of data.
    #[must_use]
    pub fn with_compression(mut self, compression: impl Into<Option<Compression>>) -> Self {
        self.compression = compression.into();
        self
    }
}

/// The contents of a folder that are of the format to write there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Existing {
    /// No file of the format.
    Nothing,
    /// A checkpoint. It is replaced only if the caller allows it.
    Checkpoint,
    /// Files of a save that did not finish. The next save replaces them.
    Remains,
    /// A checkpoint that the writer does not replace, such as one of an older version: the end of
    /// the sentence `there is another checkpoint at "run": `.
    Other(String),
}

/// The files of a format in a folder that a checkpoint of another format is written into. A write
/// would damage them, or readers would open them instead of what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Occupant {
    /// A checkpoint: the end of the sentence `there is another checkpoint at "run": `.
    Checkpoint(String),
    /// Files of a save that did not finish, with what shows it.
    Unfinished(String),
    /// The folder of a run, whose checkpoints are in folders below it.
    Run(OccupantRun),
}

/// The folder of a run, which holds no checkpoint itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OccupantRun {
    /// The name of the folder, in words: `the folder of a run of Megatron-LM`.
    pub description: &'static str,
    /// The file or folder that shows it.
    pub file: String,
    /// Names of folders in the run that checkpoints may be written into.
    pub folders: &'static [&'static str],
}

impl OccupantRun {
    /// A run, the file or folder that shows it, and names for checkpoints in it.
    #[must_use]
    pub fn new(
        description: &'static str,
        file: impl Into<String>,
        folders: &'static [&'static str],
    ) -> Self {
        Self { description, file: file.into(), folders }
    }
}
