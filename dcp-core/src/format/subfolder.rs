//! A folder of a storage as a storage.

use std::sync::Arc;

use async_trait::async_trait;

use super::streams::{FilterMap, Objects};
use crate::error::StorageError;
use crate::key::Key;
use crate::memory::Buffer;
use crate::payload::Payload;
use crate::storage::{
    Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Storage, Upload,
};

/// The objects of `inner` below `folder`, under names relative to it.
#[derive(Debug)]
pub struct Subfolder {
    inner: Arc<dyn Storage>,
    folder: Key,
}

impl Subfolder {
    /// The folder `folder` of `inner`, which need not exist.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, folder: Key) -> Self {
        Self { inner, folder }
    }

    fn key(&self, key: &Key) -> Result<Key, StorageError> {
        Ok(self.folder.join(key.as_str())?)
    }
}

/// The same object under its name in the folder; `None` when it lies elsewhere.
fn relative(folder: &Key, meta: &ObjectMeta) -> Option<ObjectMeta> {
    let name = meta.key.as_str().strip_prefix(folder.as_str())?.strip_prefix('/')?;
    Some(ObjectMeta::new(Key::new(name).ok()?, meta.byte_len).with_modified(meta.modified))
}

#[async_trait]
impl Storage for Subfolder {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let meta = self.inner.stat(&self.key(key)?).await?;
        Ok(ObjectMeta::new(key.clone(), meta.byte_len).with_modified(meta.modified))
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        self.inner.read(&self.key(key)?, reads).await
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError> {
        self.inner.put(&self.key(key)?, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.inner.start_upload(&self.key(key)?, mode).await
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        let below = match prefix.map(|prefix| self.key(prefix)).transpose() {
            Ok(below) => below.unwrap_or_else(|| self.folder.clone()),
            Err(error) => return Box::pin(Objects::from(vec![Err(error)])),
        };
        let folder = self.folder.clone();
        Box::pin(FilterMap::new(self.inner.list(Some(&below)), move |meta| {
            relative(&folder, &meta)
        }))
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        self.inner.delete(&self.key(key)?).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.inner.claim(&self.key(key)?).await
    }
}
