//! The storage under test as a clause sees it, and helpers of clauses.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use dcp_core::storage::{ObjectMeta, PutMode, ReadInto, StorageExt};
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
        self.storage.read(key, reads).await
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
        same_bytes(&self.storage.read_all(key).await?, expected)
    }

    /// Fails if an object of that key exists in any way.
    pub(super) async fn is_absent(&self, key: &Key) -> Outcome {
        expect_kind(self.storage.stat(key).await, StorageErrorKind::NotFound, "stat")?;
        expect_kind(self.read(key, &[(0, 1)]).await, StorageErrorKind::NotFound, "read")?;
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

    /// Deletes everything in the clause's folder.
    pub(super) async fn clean(&self) -> Outcome {
        for meta in self.list(None).await? {
            self.storage.delete(&meta.key).await?;
        }
        Ok(())
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
