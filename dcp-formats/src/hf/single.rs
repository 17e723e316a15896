//! Writes a single-file model, which is complete when it gets its name.

use std::sync::Arc;

use dcp_core::checkpoint::DataSource;
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, Key, Storage, StorageError, StorageErrorKind};
use indexmap::IndexMap;

use crate::safetensors::{SafetensorsItem, send};
use crate::upload::{ByteProgress, FileOptions, SentFile};

/// Bytes to read at a time when comparing the existing file.
const SEGMENT: u64 = 16 << 20;

/// An uploaded file without its name.
pub(super) struct SingleFile(SentFile);

/// The result of naming the file.
pub(super) enum Named {
    /// The new file has the name.
    New,
    /// The old file still has the name.
    Old(StorageError),
    /// The new file has the name but may not survive a crash; or the result is unknown.
    Unsure(StorageError),
}

impl SingleFile {
    /// Uploads the file.
    pub(super) async fn send(
        storage: &dyn Storage,
        (key, options): (&Key, FileOptions),
        items: &[SafetensorsItem],
        metadata: &IndexMap<String, String>,
        data: Arc<dyn DataSource>,
        progress: Option<&ByteProgress>,
    ) -> Result<Self, CheckpointError> {
        send(storage, (key, options), items, metadata, data, progress).await.map(Self)
    }

    /// Its name and size.
    pub(super) fn done(&self) -> (Key, u64) {
        (self.0.key.clone(), self.0.byte_len)
    }

    /// Discards the file.
    pub(super) async fn abort(self) {
        self.0.abort().await;
    }

    /// Gives the file its name.
    pub(super) async fn publish(self, storage: &dyn Storage) -> Named {
        let (key, byte_len, crc32) = (self.0.key.clone(), self.0.byte_len, self.0.crc32);
        let Err(error) = self.0.publish().await else { return Named::New };
        match is_there(storage, &key, byte_len, crc32).await {
            // A lost reply is not an error if the file exists.
            Ok(true) if error.is_retryable() => Named::New,
            Ok(false) => Named::Old(error),
            _ => Named::Unsure(error),
        }
    }
}

/// Whether the existing file has this length and CRC-32.
async fn is_there(
    storage: &dyn Storage,
    key: &Key,
    byte_len: u64,
    crc32: u32,
) -> Result<bool, StorageError> {
    match storage.stat(key).await {
        Ok(meta) if meta.byte_len == byte_len => {}
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    }
    let (mut hasher, mut start) = (crc32fast::Hasher::new(), 0);
    while start < byte_len {
        let end = byte_len.min(start.saturating_add(SEGMENT));
        hasher.update(&storage.read_range(key, start..end).await?);
        start = end;
    }
    Ok(hasher.finalize() == crc32)
}
