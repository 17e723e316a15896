//! A model in one file, which is a model as soon as it has its name.

use std::sync::Arc;

use dcp_core::{
    CheckpointError, DataSource, Key, Storage, StorageError, StorageErrorKind, StorageExt as _,
};
use indexmap::IndexMap;

use crate::safetensors::{SafetensorsItem, send};
use crate::upload::{FileOptions, Progress, SentFile};

/// Bytes that are read at a time to tell what lies under the name.
const SEGMENT: u64 = 16 << 20;

/// The file, sent and without its name.
pub(super) struct SingleFile(SentFile);

/// What became of the name.
pub(super) enum Named {
    /// It is the new file's.
    New,
    /// It is not.
    Old(StorageError),
    /// It is, but may not be after a crash of the machine; or it cannot be told.
    Unsure(StorageError),
}

impl SingleFile {
    /// Sends the file.
    pub(super) async fn send(
        storage: &dyn Storage,
        (key, options): (&Key, FileOptions),
        items: &[SafetensorsItem],
        metadata: &IndexMap<String, String>,
        data: Arc<dyn DataSource>,
        progress: Option<&Progress>,
    ) -> Result<Self, CheckpointError> {
        send(storage, (key, options), items, metadata, data, progress).await.map(Self)
    }

    /// Its name and bytes.
    pub(super) fn done(&self) -> (Key, u64) {
        (self.0.key.clone(), self.0.byte_len)
    }

    /// Throws it away.
    pub(super) async fn abort(self) {
        self.0.abort().await;
    }

    /// Gives it its name.
    pub(super) async fn publish(self, storage: &dyn Storage) -> Named {
        let SentFile { key, byte_len, crc32, upload } = self.0;
        let Err(error) = upload.complete().await else { return Named::New };
        match is_there(storage, &key, byte_len, crc32).await {
            // A reply that was lost is no failure where the file is there.
            Ok(true) if error.is_retryable() => Named::New,
            Ok(false) => Named::Old(error),
            _ => Named::Unsure(error),
        }
    }
}

/// Whether a file has this length and CRC-32.
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
