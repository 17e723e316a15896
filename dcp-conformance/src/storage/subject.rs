//! The storage under test in a clause, and helpers of clauses.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use dcp_core::storage::{FolderEntry, ObjectMeta, PutMode, ReadInto, ReadRequest, UploadOptions};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::TryStreamExt;

use crate::case::{Failure, Outcome, ensure};

/// A storage, and the folder of one clause in one run.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) folder: Key,
}

impl Subject {
    pub(super) fn new(storage: Arc<dyn Storage>, case: &str) -> Result<Self, Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let run = format!("{:x}-{:x}", std::process::id(), now.as_nanos());
        let folder = Key::new(format!("dcp-conformance/{run}/{case}"))?;
        Ok(Self { storage, folder })
    }

    /// The key `name` in the clause's folder.
    pub(super) fn key(&self, name: &str) -> Result<Key, Failure> {
        Ok(self.folder.join(name)?)
    }

    /// Creates the object `name`, and returns its key.
    pub(super) async fn create(&self, name: &str, bytes: &Bytes) -> Result<Key, Failure> {
        let key = self.key(name)?;
        self.storage.put(&key, bytes.clone().into(), PutMode::Create).await?;
        Ok(key)
    }

    /// Reads `ranges`, each an offset and a length.
    pub(super) async fn read(
        &self,
        key: &Key,
        ranges: &[(u64, usize)],
    ) -> Result<Vec<Buffer>, StorageError> {
        let reads = ranges
            .iter()
            .map(|&(byte_offset, len)| ReadInto { byte_offset, buffer: Buffer::zeroed(len) })
            .collect();
        Ok(self.storage.read(key, ReadRequest::new(reads)).await?.buffers)
    }

    /// The length of the parts of an upload: `wished`, if the storage allows it.
    pub(super) fn part_len(&self, wished: usize) -> usize {
        let limits = self.storage.capabilities().write_limits;
        let len = (wished as u64).max(limits.part_bytes_min).min(limits.part_bytes_max);
        usize::try_from(len).unwrap_or(wished)
    }

    /// Starts an upload in parts of `part_len` bytes.
    pub(super) async fn start(
        &self,
        key: &Key,
        mode: PutMode,
        part_len: usize,
    ) -> Result<Box<dyn dcp_core::storage::Upload>, StorageError> {
        self.storage.start_upload(key, UploadOptions::new(mode, part_len as u64)).await
    }

    /// Uploads `bytes` in parts of `part_len` bytes, one after the other, without completing.
    pub(super) async fn send(
        &self,
        key: &Key,
        mode: PutMode,
        bytes: &Bytes,
        part_len: usize,
    ) -> Result<Box<dyn dcp_core::storage::Upload>, StorageError> {
        let mut upload = self.start(key, mode, part_len).await?;
        for part in in_pieces(bytes, part_len).pieces() {
            upload.put_part(part.clone().into()).await?;
        }
        Ok(upload)
    }

    /// Fails unless the object is exactly `expected`.
    pub(super) async fn holds(&self, key: &Key, expected: &Bytes) -> Outcome {
        let meta = self.storage.stat(key).await?;
        ensure!(
            meta.byte_len == expected.len() as u64,
            "{key:?} should have {} bytes, stat says {}",
            expected.len(),
            meta.byte_len
        );
        same_bytes(&self.whole(key).await?, expected)
    }

    /// The bytes of an object.
    pub(super) async fn whole(&self, key: &Key) -> Result<Bytes, StorageError> {
        Ok(self.storage.read_whole(key, 1 << 40).await?.bytes)
    }

    /// Fails if any operation finds an object of that key.
    pub(super) async fn is_absent(&self, key: &Key) -> Outcome {
        expect_kind(self.storage.stat(key).await, StorageErrorKind::NotFound, "stat")?;
        expect_kind(self.read(key, &[(0, 1)]).await, StorageErrorKind::NotFound, "read")?;
        let whole = self.storage.read_whole(key, 1).await;
        expect_kind(whole, StorageErrorKind::NotFound, "read_whole")?;
        let listed = self.list(None).await?;
        ensure!(listed.iter().all(|meta| meta.key != *key), "{key:?} is absent, but listed");
        Ok(())
    }

    /// The listing of the folder `name` of the clause, or of its whole folder, in key order.
    pub(super) async fn list(&self, name: Option<&str>) -> Result<Vec<ObjectMeta>, Failure> {
        let prefix = match name {
            Some(name) => self.key(name)?,
            None => self.folder.clone(),
        };
        let mut listed = self.storage.list(Some(&prefix)).try_collect::<Vec<_>>().await?;
        listed.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(listed)
    }

    /// The entries directly in the folder `name` of the clause, or in its own folder: folders, and
    /// objects with their lengths, in key order.
    pub(super) async fn entries(
        &self,
        name: Option<&str>,
    ) -> Result<Vec<(Key, Option<u64>)>, Failure> {
        let folder = match name {
            Some(name) => self.key(name)?,
            None => self.folder.clone(),
        };
        let entries = self.storage.list_folder(Some(&folder)).try_collect::<Vec<_>>().await?;
        let mut found = entries
            .into_iter()
            .filter_map(|entry| match entry {
                FolderEntry::Object(meta) => Some((meta.key, Some(meta.byte_len))),
                FolderEntry::Folder(folder) => Some((folder, None)),
                _ => None,
            })
            .collect::<Vec<_>>();
        found.sort();
        Ok(found)
    }

    /// Deletes everything in the clause's folder.
    pub(super) async fn clean(&self) -> Outcome {
        let keys = self.list(None).await?.into_iter().map(|meta| meta.key).collect::<Vec<_>>();
        Ok(self.storage.delete(&keys).await?)
    }
}

/// Numbers that are the same in every run.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end.max(1)
    }
}

/// `len` bytes that depend on position and `seed`.
pub(super) fn pattern(seed: u64, len: usize) -> Bytes {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes.into()
}

/// Splits bytes into pieces of `piece_len`.
pub(super) fn in_pieces(bytes: &Bytes, piece_len: usize) -> Payload {
    (0..bytes.len())
        .step_by(piece_len)
        .map(|start| bytes.slice(start..bytes.len().min(start + piece_len)))
        .collect()
}

/// Fails at the first byte that differs.
pub(super) fn same_bytes(got: &[u8], expected: &[u8]) -> Outcome {
    ensure!(
        got.len() == expected.len(),
        "{} bytes were read, {} are right",
        got.len(),
        expected.len()
    );
    if got == expected {
        return Ok(());
    }
    match got.iter().zip(expected).position(|(got, expected)| got != expected) {
        Some(at) => Err(Failure::new(format!("byte {at} of {} is wrong", got.len()))),
        None => Ok(()),
    }
}

/// Fails unless `outcome` is an error of `kind`.
pub(super) fn expect_kind<T: Debug>(
    outcome: Result<T, StorageError>,
    kind: StorageErrorKind,
    doing: &str,
) -> Outcome {
    match outcome {
        Err(error) if error.kind() == kind => Ok(()),
        Err(error) => Err(Failure::new(format!(
            "{doing}: expected {kind:?}, got {:?}: {}",
            error.kind(),
            dcp_core::error::error_chain(&error)
        ))),
        Ok(value) => Err(Failure::new(format!("{doing}: expected {kind:?}, got {value:?}"))),
    }
}
