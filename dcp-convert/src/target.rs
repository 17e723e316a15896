//! Where a job writes one file, and the refusal to replace what is there.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::{
    Buffer, Capabilities, Claim, Key, ObjectMeta, ObjectStream, Payload, PutMode, ReadInto,
    Storage, StorageError, StorageExt, Upload,
};

use crate::error::ConvertError;

/// A file to write.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where it goes.
    pub storage: Arc<dyn Storage>,
    /// Its name there.
    pub key: Key,
    /// Whether a file of that name is replaced; otherwise it is an error.
    pub overwrite: bool,
}

impl Target {
    /// A file of a name that must be free.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self { storage, key, overwrite: false }
    }

    /// The same, replacing a file of that name or not.
    #[must_use]
    pub fn overwriting(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// Refuses a name that is taken, before any work is done.
    pub(crate) async fn check(&self) -> Result<(), ConvertError> {
        if !self.overwrite && self.storage.contains(&self.key).await? {
            return Err(ConvertError::TargetExists { target: self.key.to_string() });
        }
        Ok(())
    }

    /// The storage to create the file in: one that replaces, if that was asked for.
    pub(crate) fn creator(&self) -> Arc<dyn Storage> {
        if self.overwrite {
            Arc::new(Replacing(Arc::clone(&self.storage)))
        } else {
            Arc::clone(&self.storage)
        }
    }
}

/// A storage in which creating an object replaces one of the same name, once the new one is
/// complete.
#[derive(Debug)]
struct Replacing(Arc<dyn Storage>);

#[async_trait]
impl Storage for Replacing {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.0.stat(key).await
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        self.0.read(key, reads).await
    }

    async fn put(&self, key: &Key, payload: Payload, _mode: PutMode) -> Result<(), StorageError> {
        self.0.put(key, payload, PutMode::Overwrite).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        _mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.0.start_upload(key, PutMode::Overwrite).await
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        self.0.list(prefix)
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        self.0.delete(key).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.0.claim(key).await
    }
}
