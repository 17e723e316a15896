//! Objects, their versions, and requests for their bytes.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;

use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::names::key::Key;
use crate::tensors::memory::Buffer;

/// Identifies the contents of an object: two versions of an object that differ have different
/// bytes at different times. An ETag or a generation of an object store; inode, length and time of
/// the last write of a file.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Version(Arc<str>);

impl Version {
    /// A version from the storage's own text.
    #[must_use]
    pub fn new(text: impl AsRef<str>) -> Self {
        Self(text.as_ref().into())
    }

    /// The storage's own text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&crate::text::Quoted(&self.0), f)
    }
}

/// Facts about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectMeta {
    /// Its name.
    pub key: Key,
    /// Its length in bytes.
    pub byte_len: u64,
    /// The time of its last write, if the storage has it.
    pub modified: Option<SystemTime>,
    /// Its version, if the storage has versions.
    pub version: Option<Version>,
}

impl ObjectMeta {
    /// An object of `byte_len` bytes, of unknown age and version.
    #[must_use]
    pub fn new(key: Key, byte_len: u64) -> Self {
        Self { key, byte_len, modified: None, version: None }
    }

    /// Replaces the key, as a decorator shows the object under another name.
    #[must_use]
    pub fn with_key(mut self, key: Key) -> Self {
        self.key = key;
        self
    }

    /// Sets the time of the last write.
    #[must_use]
    pub fn with_modified(mut self, modified: Option<SystemTime>) -> Self {
        self.modified = modified;
        self
    }

    /// Sets the version.
    #[must_use]
    pub fn with_version(mut self, version: Option<Version>) -> Self {
        self.version = version;
        self
    }
}

/// An entry of one folder, from [`Storage::list_folder`](super::Storage::list_folder).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FolderEntry {
    /// An object directly in the folder.
    Object(ObjectMeta),
    /// A folder directly in the folder, which has objects somewhere below it. A file system may
    /// also list empty folders.
    Folder(Key),
}

impl FolderEntry {
    /// The entries of a folder, by all objects that are in it at any depth; of the root, if there is no folder.
    pub fn of_objects(
        objects: Vec<ObjectMeta>,
        folder: Option<&Key>,
    ) -> impl Iterator<Item = Self> + Send + use<> {
        let skipped = folder.map_or(0, |folder| folder.as_str().len() + 1);
        let (mut folders, mut entries) = (BTreeSet::new(), Vec::new());
        for object in objects {
            let name = object.key.as_str();
            match name.get(skipped..).and_then(|below| below.split_once('/')) {
                None => entries.push(Self::Object(object)),
                Some((below, _)) => folders.extend(Key::new(&name[..skipped + below.len()])),
            }
        }
        entries.into_iter().chain(folders.into_iter().map(Self::Folder))
    }
}

/// One range to read: its offset in the object, and the memory to fill.
#[derive(Debug)]
pub struct ReadInto {
    /// The offset of the range in the object.
    pub byte_offset: u64,
    /// The memory, which is filled completely.
    pub buffer: Buffer,
}

/// Ranges of one object to read.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct ReadRequest {
    /// The ranges, in any order; they may overlap.
    pub ranges: Vec<ReadInto>,
    /// The version that the bytes must have; any version when `None`.
    pub if_version: Option<Version>,
}

impl ReadRequest {
    /// Requests ranges of whatever version the object has.
    #[must_use]
    pub fn new(ranges: Vec<ReadInto>) -> Self {
        Self { ranges, if_version: None }
    }

    /// Requires a version.
    #[must_use]
    pub fn with_if_version(mut self, version: Option<Version>) -> Self {
        self.if_version = version;
        self
    }
}

impl ReadRequest {
    /// Fills the buffers from all `bytes` of the object `key`.
    ///
    /// # Errors
    ///
    /// [`StorageErrorKind::Truncated`] when a range ends behind them.
    pub fn fill_from(self, key: &Key, bytes: &[u8]) -> Result<ReadOutcome, StorageError> {
        let fill = |ReadInto { byte_offset, mut buffer }: ReadInto| {
            if buffer.is_empty() {
                return Ok(buffer);
            }
            let source = usize::try_from(byte_offset)
                .ok()
                .and_then(|start| bytes.get(start..start.checked_add(buffer.len())?));
            let Some(source) = source else {
                let (wanted, len) = (buffer.len(), bytes.len());
                let kind = StorageErrorKind::Truncated;
                let error = StorageError::new(kind, StorageOp::Read, Some(key.clone()));
                return Err(error.with_message(format!(
                    "{wanted} bytes at {byte_offset} were requested, the object has {len}"
                )));
            };
            buffer.copy_from_slice(source);
            Ok(buffer)
        };
        let buffers = self.ranges.into_iter().map(fill).collect::<Result<_, _>>()?;
        Ok(ReadOutcome::new(buffers))
    }
}

impl From<Vec<ReadInto>> for ReadRequest {
    fn from(ranges: Vec<ReadInto>) -> Self {
        Self::new(ranges)
    }
}

/// The bytes of a [`ReadRequest`].
#[derive(Debug)]
#[non_exhaustive]
pub struct ReadOutcome {
    /// The filled buffers, in the order of the request.
    pub buffers: Vec<Buffer>,
    /// The version of all bytes, if the storage has versions.
    pub version: Option<Version>,
}

impl ReadOutcome {
    /// Filled buffers of unknown version.
    #[must_use]
    pub fn new(buffers: Vec<Buffer>) -> Self {
        Self { buffers, version: None }
    }

    /// Sets the version.
    #[must_use]
    pub fn with_version(mut self, version: Option<Version>) -> Self {
        self.version = version;
        self
    }
}

/// An object and all of its bytes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WholeObject {
    /// Facts about the object, of the same version as its bytes.
    pub meta: ObjectMeta,
    /// Its bytes.
    pub bytes: Bytes,
}

impl WholeObject {
    /// An object and its bytes.
    #[must_use]
    pub fn new(meta: ObjectMeta, bytes: Bytes) -> Self {
        Self { meta, bytes }
    }
}

/// The treatment of an existing object by a write.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PutMode {
    /// Fail; exactly one of several concurrent creators wins.
    Create,
    /// Replace it atomically: a reader sees the old bytes or the new ones.
    Overwrite,
    /// Replace it atomically if it still has this version; fail otherwise, or if it is gone.
    Update(Version),
}

/// Options to write an object in parts.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UploadOptions {
    /// The treatment of an existing object.
    pub mode: PutMode,
    /// The length of every part except the last, which is at most as long.
    pub part_bytes: u64,
    /// The length of the object, if it is known.
    pub byte_len: Option<u64>,
    /// The most permissions that the file gets, as the bits of `chmod`, on a storage of files; without
    /// them those that new files get.
    pub permissions: Option<u32>,
}

impl UploadOptions {
    /// Parts of `part_bytes` bytes, from
    /// [`WriteLimits::part_bytes_for`](super::WriteLimits::part_bytes_for).
    #[must_use]
    pub fn new(mode: PutMode, part_bytes: u64) -> Self {
        Self { mode, part_bytes, byte_len: None, permissions: None }
    }

    /// Announces the length of the object, for storages that reserve space.
    #[must_use]
    pub fn with_byte_len(mut self, byte_len: u64) -> Self {
        self.byte_len = Some(byte_len);
        self
    }

    /// Bounds the permissions of the file, on a storage of files.
    #[must_use]
    pub fn with_permissions(mut self, permissions: Option<u32>) -> Self {
        self.permissions = permissions;
        self
    }
}
