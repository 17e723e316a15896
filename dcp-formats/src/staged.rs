//! Small objects that are sent before anything they replace is touched.

use bytes::Bytes;
use dcp_core::{
    Key, Payload, PutMode, Storage, StorageError, StorageErrorKind, StorageExt as _, StorageOp,
    Upload,
};

/// Objects that were sent and have no name yet: giving them theirs takes no more space.
///
/// A commit that replaces several objects stages them first, so that a full disk stops it while
/// all is as it was. What it may have to put back is staged too.
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
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends an object.
    ///
    /// # Errors
    ///
    /// When the storage does not take it; what was staged before stays staged.
    pub async fn add(
        &mut self,
        storage: &dyn Storage,
        key: &Key,
        bytes: Bytes,
        mode: PutMode,
    ) -> Result<(), StorageError> {
        let mut upload = storage.start_upload(key, mode).await?;
        match upload.put_part(Payload::from(bytes.clone())).await {
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

    /// The names that are staged, in the order in which they were added.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.uploads.iter().map(|one| &one.key)
    }

    /// Gives an object its name. A reply that is lost is no failure where the object is there.
    ///
    /// # Errors
    ///
    /// When the storage fails, or nothing was staged under this name.
    pub async fn publish(&mut self, storage: &dyn Storage, key: &Key) -> Result<(), StorageError> {
        let Some(at) = self.uploads.iter().position(|one| one.key == *key) else {
            let kind = StorageErrorKind::Invalid;
            return Err(StorageError::new(kind, StorageOp::Upload, Some(key.clone()))
                .with_message("nothing was staged under this name"));
        };
        let One { key, bytes, upload } = self.uploads.remove(at);
        let Err(error) = upload.complete().await else { return Ok(()) };
        let found = if error.is_retryable() { storage.read_all(&key).await.ok() } else { None };
        if found.as_ref() == Some(&bytes) { Ok(()) } else { Err(error) }
    }

    /// Throws away what has no name yet.
    pub async fn abort(&mut self) {
        for One { key, upload, .. } in self.uploads.drain(..) {
            abort(&key, upload).await;
        }
    }
}

async fn abort(key: &Key, upload: Box<dyn Upload>) {
    if let Err(error) = upload.abort().await {
        tracing::debug!(%key, %error, "cannot abort an upload");
    }
}
