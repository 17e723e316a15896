//! [`Storage`] over an `ObjectStore`.

mod builder;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp as Op;
use dcp_core::storage::{
    Capabilities, Claim, ConditionalClaim, FolderStream, Leftover, LeftoverAction, ObjectMeta,
    ObjectStream, PutMode, ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind as Kind};
use object_store::ObjectStore;

use crate::inner::Inner;
use crate::retry::Attempts;

pub use builder::ObjectStorageBuilder;

/// A storage over an `ObjectStore` of the `object_store` crate. Clones share its connections.
#[derive(Clone)]
pub struct ObjectStorage(pub(crate) Arc<Inner>);

impl ObjectStorage {
    /// Settings for a storage over any `ObjectStore`. This is the only place where a type of the
    /// `object_store` crate is in the interface of this one; its version has to be the same.
    pub fn builder(store: Arc<dyn ObjectStore>) -> ObjectStorageBuilder {
        ObjectStorageBuilder::new(store)
    }
}

impl fmt::Debug for ObjectStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The store is not shown: its settings may have secrets.
        f.debug_struct("ObjectStorage")
            .field("provider", &self.0.provider)
            .field("prefix", &self.0.prefix)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Storage for ObjectStorage {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let path = self.0.prefix.path(Op::Stat, key)?;
        let mut attempts = Attempts::new(self.0.retry);
        match self.0.head(Op::Stat, &path, &mut attempts).await {
            Ok(found) => Ok(self.0.meta(key, found.meta)),
            Err(failure) => Err(failure.into_error(Op::Stat, Some(key), &attempts.summary())),
        }
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        self.0.read(key, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        self.0.read_whole(key, max_bytes).await
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.0.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        crate::upload::start(&self.0, key, options).await
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        crate::list::list(&self.0, folder)
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        crate::list::list_folder(&self.0, folder)
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        self.0.delete(keys).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        if !self.0.capabilities.claims {
            return Err(StorageError::new(Kind::Unsupported, Op::Claim, Some(key.clone())));
        }
        Ok(Arc::new(ConditionalClaim::take(Arc::new(self.clone()), key).await?))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        if action == LeftoverAction::Remove {
            self.0.check_writable(Op::RemoveLeftovers, folder)?;
        }
        crate::leftovers::find(&self.0, folder, min_age, action).await
    }

    async fn remove_empty_folders(&self, _: &Key) -> Result<(), StorageError> {
        Ok(())
    }
}
