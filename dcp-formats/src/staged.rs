//! Uploads small objects before anything they replace changes.

use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::storage::{PutMode, StorageExt as _, Upload};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};

use crate::upload::upload_options;

/// Objects that are uploaded but have no names yet; naming them takes no more space. A commit that
/// replaces several objects stages them first, so that a full disk fails it while nothing has
/// changed. It also stages what a rollback restores.
#[derive(Debug, Default)]
pub struct Staged {
    uploads: Vec<One>,
}

#[derive(Debug)]
struct One {
    key: Key,
    bytes: Bytes,
    upload: Box<dyn Upload>,
}

impl Staged {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Uploads an object.
    ///
    /// # Errors
    ///
    /// When the storage refuses it. Objects staged before stay staged.
    pub async fn add(
        &mut self,
        storage: &dyn Storage,
        key: &Key,
        bytes: Bytes,
        mode: PutMode,
    ) -> Result<(), StorageError> {
        let options = upload_options(storage, key, mode, bytes.len() as u64)?;
        let part_bytes = options.part_bytes;
        let mut upload = storage.start_upload(key, options).await?;
        match send(&mut *upload, &bytes, part_bytes).await {
            Ok(()) => {
                self.uploads.push(One { key: key.clone(), bytes, upload });
                Ok(())
            }
            Err(error) => {
                abort(key, upload).await;
                Err(error)
            }
        }
    }

    /// The staged names, in the order of [`add`](Self::add).
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.uploads.iter().map(|one| &one.key)
    }

    /// Gives an object its name. A lost reply is not an error if the object exists.
    ///
    /// # Errors
    ///
    /// When the storage fails, or nothing is staged under this name.
    pub async fn publish(&mut self, storage: &dyn Storage, key: &Key) -> Result<(), StorageError> {
        let Some(at) = self.uploads.iter().position(|one| one.key == *key) else {
            let kind = StorageErrorKind::Invalid;
            return Err(StorageError::new(kind, StorageOp::Upload, Some(key.clone()))
                .with_message("nothing was staged under this name"));
        };
        let One { key, bytes, upload } = self.uploads.remove(at);
        let error = match upload.complete().await {
            Ok(_) => return Ok(()),
            Err(error) => error,
        };
        let found = if error.is_retryable() { storage.read_all(&key).await.ok() } else { None };
        if found.as_ref() == Some(&bytes) { Ok(()) } else { Err(error) }
    }

    /// Discards all objects without names.
    pub async fn abort(&mut self) {
        for One { key, upload, .. } in self.uploads.drain(..) {
            abort(&key, upload).await;
        }
    }
}

async fn send(upload: &mut dyn Upload, bytes: &Bytes, part_bytes: u64) -> Result<(), StorageError> {
    let part_len = usize::try_from(part_bytes).unwrap_or(usize::MAX).max(1);
    for begin in (0..bytes.len()).step_by(part_len) {
        let end = bytes.len().min(begin.saturating_add(part_len));
        upload.put_part(Payload::from(bytes.slice(begin..end))).await?;
    }
    Ok(())
}

async fn abort(key: &Key, upload: Box<dyn Upload>) {
    if let Err(error) = upload.abort().await {
        tracing::debug!(%key, %error, "cannot abort an upload");
    }
}
