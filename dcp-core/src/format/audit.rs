//! Checks of an opened checkpoint beyond its tensors and objects.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;

use super::save_record::SaveRecord;
use crate::error::CheckpointError;
use crate::names::key::Key;
use crate::plans::metadata::CheckpointMetadata;

/// The checks of a format that its [`StorageReader`](crate::StorageReader) does not make: stored
/// checksums, bytes that no tensor covers, files that the index does not name.
///
/// A format gives it to [`OpenedCheckpoint::with_audit`](super::OpenedCheckpoint::with_audit).
/// `verify` and every job that compares what it reads then call it.
#[async_trait]
pub trait CheckpointAudit: fmt::Debug + Send + Sync + 'static {
    /// Checks the index, and the names and lengths of files. No tensor is read.
    ///
    /// # Errors
    ///
    /// When the storage fails. What is wrong with the checkpoint is in the [`Findings`].
    async fn findings(&self) -> Result<Findings, CheckpointError>;

    /// Returns the way in which a deep check compares the elements of a chunk. No tensor is read.
    ///
    /// # Errors
    ///
    /// When the checksum is damaged, or the storage fails.
    async fn checksum(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        entry: usize,
        chunk: usize,
    ) -> Result<ChunkChecksum, CheckpointError>;

    /// Returns the facts that the index records besides tensors and objects. No file but the index is read.
    ///
    /// # Errors
    ///
    /// When the index cannot be read.
    async fn index_facts(&self) -> Result<IndexFacts, CheckpointError>;

    /// Returns the record of the save besides the index: the program, its ranks and steps, and how much has
    /// checksums, of the entries of the metadata that `counted` names by position. `None` for a format
    /// whose saves write no record. No tensor is read.
    ///
    /// # Errors
    ///
    /// When the storage fails. A record that cannot be read is [`SaveRecord::Damaged`].
    async fn save_record(&self, counted: &[bool]) -> Result<Option<SaveRecord>, CheckpointError>;

    /// The checks of stored records, for a format that has records.
    fn records(&self) -> Option<&dyn RecordAudit>;
}

/// The checks of a format whose checksums are of records: ranges of files that a deep check compares
/// as a whole, besides chunks whose [`checksum`](CheckpointAudit::checksum) is their own. An index is
/// one, or a storage that several tensors share.
#[async_trait]
pub trait RecordAudit: Send + Sync {
    /// All records.
    ///
    /// # Errors
    ///
    /// When the index cannot be read, or the storage fails.
    async fn records(&self) -> Result<Vec<StoredRecord>, CheckpointError>;

    /// Reads `record`, one of [`records`](Self::records), and compares it with its checksum. Reads at
    /// most [`RecordLimits::segment_bytes`] at once.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Format`] when it is damaged, and when the storage fails.
    async fn check_record(
        &self,
        record: &StoredRecord,
        limits: RecordLimits<'_>,
    ) -> Result<(), CheckpointError>;

    /// Compares the bytes between the records, such as the headers of an archive.
    ///
    /// # Errors
    ///
    /// When the storage fails. What is wrong is returned.
    async fn check_structure(&self) -> Result<Vec<FoundProblem>, CheckpointError>;
}

/// Facts that an index records besides tensors and objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexFacts {
    /// The functions and classes that Python imports when it loads the index, and that are not known
    /// to be harmless.
    pub callables: Vec<IndexCallable>,
    /// Devices other than the CPU that tensors were on, by the number of the entry.
    pub devices: BTreeMap<usize, String>,
    /// Files of the checkpoint that no entry names, because they cannot be read.
    pub unread_files: Vec<Key>,
    /// Signs that the save did not finish, for people.
    pub unfinished: Vec<String>,
}

/// A function or class that Python imports when it loads an index.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IndexCallable {
    /// The index, where it is not the whole checkpoint.
    pub index: Option<&'static str>,
    /// The qualified name, such as `os.system`.
    pub name: String,
    /// Its place in the index: keys and positions, joined by dots. `None` where Python discards the
    /// value.
    pub path: Option<String>,
    /// Whether it is known to run commands or code. `false` means unknown, not safe.
    pub dangerous: bool,
}

impl IndexCallable {
    /// A callable of this qualified name, at this path.
    #[must_use]
    pub fn new(name: impl Into<String>, path: Option<String>, dangerous: bool) -> Self {
        Self { index: None, name: name.into(), path, dangerous }
    }

    /// Sets the index that imports it, where that is not the whole checkpoint.
    #[must_use]
    pub fn in_index(mut self, index: &'static str) -> Self {
        self.index = Some(index);
        self
    }
}

/// The way in which a deep check compares a chunk with the bytes that were saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChunkChecksum {
    /// There is no checksum.
    Absent,
    /// The CRC-32 of its elements: row-major, and as the reader returns them.
    Crc32(u32),
    /// The reader compares it in every read, however little of the chunk that reads.
    EveryRead,
    /// The chunk is in a record, whose checksum is over other bytes, too.
    Record,
    /// Its encoding has one, as the archives of [`Layout::TorchArchive`](crate::metadata::Layout)
    /// do.
    Encoding,
    /// Its encoding has one, and the save noted that this is the CRC-32 of its elements: a file of
    /// another save is sound in itself.
    EncodingOf(u32),
}

/// A range of a file that a deep check compares as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredRecord {
    /// The name of the record, in words: the name in an archive, `the index`.
    pub name: String,
    /// The file.
    pub file: Key,
    /// Its place in the file. Tensors and objects that are placed within are checked with it.
    pub bytes: Range<u64>,
    /// The tensors in it, of which messages name some.
    pub keys: Vec<Arc<str>>,
}

impl StoredRecord {
    /// A record at this place.
    #[must_use]
    pub fn new(name: impl Into<String>, file: Key, bytes: Range<u64>) -> Self {
        Self { name: name.into(), file, bytes, keys: Vec::new() }
    }

    /// Sets the tensors in the record.
    #[must_use]
    pub fn with_keys(mut self, keys: Vec<Arc<str>>) -> Self {
        self.keys = keys;
        self
    }
}

/// The length of the reads of a record, and the receiver of the progress.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct RecordLimits<'a> {
    /// Bytes to read at once; at least one.
    pub segment_bytes: u64,
    progress: &'a (dyn Fn(u64) + Send + Sync),
}

impl<'a> RecordLimits<'a> {
    /// Reads of this length, each of which is reported to `progress`.
    #[must_use]
    pub fn new(segment_bytes: u64, progress: &'a (dyn Fn(u64) + Send + Sync)) -> Self {
        Self { segment_bytes: segment_bytes.max(1), progress }
    }

    /// Reports so many bytes as read.
    pub fn advance(&self, bytes: u64) {
        (self.progress)(bytes);
    }
}

impl fmt::Debug for RecordLimits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordLimits")
            .field("segment_bytes", &self.segment_bytes)
            .finish_non_exhaustive()
    }
}

/// The problems and notes that a format finds without reading tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Findings {
    /// Problems of the checkpoint.
    pub problems: Vec<FoundProblem>,
    /// Oddities that do no harm, for people.
    pub notes: Vec<String>,
    /// The data that a deep check cannot compare, for people.
    pub unchecked: Option<String>,
    /// Whether different tensors may be placed over the same bytes, as views of one storage are.
    pub shares_bytes: bool,
}

impl Findings {
    /// These problems and notes.
    #[must_use]
    pub fn new(problems: Vec<FoundProblem>, notes: Vec<String>) -> Self {
        Self { problems, notes, unchecked: None, shares_bytes: false }
    }

    /// Sets the data that a deep check cannot compare, for people.
    #[must_use]
    pub fn with_unchecked(mut self, unchecked: Option<String>) -> Self {
        self.unchecked = unchecked;
        self
    }

    /// Sets [`shares_bytes`](Self::shares_bytes): for a format whose tensors may share bytes.
    #[must_use]
    pub fn with_shares_bytes(mut self, shares_bytes: bool) -> Self {
        self.shares_bytes = shares_bytes;
        self
    }
}

/// A problem of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundProblem {
    /// Its kind.
    pub kind: FoundKind,
    /// The problem, in words.
    pub message: String,
    /// The tensor or object.
    pub key: Option<Arc<str>>,
    /// The file.
    pub file: Option<Key>,
    /// The offset in the file of the first byte in question.
    pub byte_offset: Option<u64>,
}

impl FoundProblem {
    /// A problem of the checkpoint as a whole.
    #[must_use]
    pub fn new(kind: FoundKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), key: None, file: None, byte_offset: None }
    }

    /// Sets the tensor or object.
    #[must_use]
    pub fn with_key(mut self, key: Option<Arc<str>>) -> Self {
        self.key = key;
        self
    }

    /// Sets the file.
    #[must_use]
    pub fn with_file(mut self, file: Option<Key>) -> Self {
        self.file = file;
        self
    }

    /// Sets the offset in the file of the first byte in question.
    #[must_use]
    pub fn at(mut self, byte_offset: Option<u64>) -> Self {
        self.byte_offset = byte_offset;
        self
    }
}

/// The kind of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FoundKind {
    /// The index contradicts itself or its files.
    Index,
    /// A file does not exist.
    MissingFile,
    /// The writer did not come to its end.
    Unfinished,
    /// A file ends before the bytes that should be in it.
    ShortFile,
    /// A file has another length than when the checkpoint was committed.
    ChangedFile,
    /// Two items claim the same bytes of a file.
    SharedBytes,
    /// Bytes cannot be decoded, or differ from their checksum.
    Corrupt,
}
