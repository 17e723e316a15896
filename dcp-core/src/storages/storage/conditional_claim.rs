//! A [`Claim`] over conditional writes.

use std::sync::{Arc, PoisonError};

use async_trait::async_trait;

use super::{Claim, ObjectMeta, PutMode, Storage, Version};
use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::names::key::Key;
use crate::tensors::payload::Payload;

/// The claim of an object in a storage with [`PutMode::Update`]: it notes the version of the object,
/// and replaces that version only. An object that does not exist yet is created.
///
/// Nothing is locked. Of overlapping claims the first to replace the object wins; the others fail,
/// also after any other write of the object.
#[derive(Debug)]
pub struct ConditionalClaim<S: ?Sized> {
    key: Key,
    seen: std::sync::Mutex<Option<Version>>,
    storage: Arc<S>,
}

impl<S: Storage + ?Sized> ConditionalClaim<S> {
    /// Claims an object of a storage whose capabilities include
    /// [`conditional_put`](super::Capabilities::conditional_put) and
    /// [`atomic_create`](super::Capabilities::atomic_create).
    ///
    /// # Errors
    ///
    /// Those of [`Storage::stat`], except that the object may be missing.
    pub async fn take(storage: Arc<S>, key: &Key) -> Result<Self, StorageError> {
        let seen = match storage.stat(key).await {
            Ok(meta) => Some(meta.version.ok_or_else(|| {
                StorageError::new(
                    StorageErrorKind::Unsupported,
                    StorageOp::Claim,
                    Some(key.clone()),
                )
                .with_message("the storage returned no version of the object")
            })?),
            Err(error) if error.kind() == StorageErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(Self { key: key.clone(), seen: seen.into(), storage })
    }
}

#[async_trait]
impl<S: Storage + ?Sized> Claim for ConditionalClaim<S> {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mode = seen.map_or(PutMode::Create, PutMode::Update);
        let meta = self.storage.put(&self.key, payload, mode).await.map_err(|error| {
            let is_lost = matches!(
                error.kind(),
                StorageErrorKind::Conflict | StorageErrorKind::AlreadyExists
            );
            if !is_lost {
                return error;
            }
            StorageError::new(StorageErrorKind::Conflict, StorageOp::Claim, Some(self.key.clone()))
                .with_message("another writer replaced it after it was claimed")
                .with_source(error)
        })?;
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = meta.version.clone();
        Ok(meta)
    }
}
