//! A folder of a storage as a storage.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::StorageError;
use crate::names::key::Key;
use crate::storages::storage::{
    Claim, FolderEntry, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream,
    PartFuture, PutMode, ReadOutcome, ReadRequest, Storage, Upload, UploadOptions, WholeObject,
};
use crate::storages::streams::{FilterMap, Known};
use crate::tensors::payload::Payload;

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

    fn below(&self, folder: Option<&Key>) -> Result<Key, StorageError> {
        folder.map_or_else(|| Ok(self.folder.clone()), |folder| self.key(folder))
    }
}

/// The name of a key in the folder; `None` when it is elsewhere.
fn name_in(folder: &Key, key: &Key) -> Option<Key> {
    Key::new(key.as_str().strip_prefix(folder.as_str())?.strip_prefix('/')?).ok()
}

/// Renames an object to its name in the folder; `None` when it is elsewhere.
fn relative(folder: &Key, meta: ObjectMeta) -> Option<ObjectMeta> {
    Some(ObjectMeta { key: name_in(folder, &meta.key)?, ..meta })
}

/// Replaces the key of an object.
fn renamed(meta: ObjectMeta, key: &Key) -> ObjectMeta {
    ObjectMeta { key: key.clone(), ..meta }
}

#[async_trait]
impl Storage for Subfolder {
    crate::forward_storage!(inner: capabilities);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        Ok(renamed(self.inner.stat(&self.key(key)?).await?, key))
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        self.inner.read(&self.key(key)?, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let WholeObject { meta, bytes } = self.inner.read_whole(&self.key(key)?, max_bytes).await?;
        Ok(WholeObject::new(renamed(meta, key), bytes))
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        Ok(renamed(self.inner.put(&self.key(key)?, payload, mode).await?, key))
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let inner = self.inner.start_upload(&self.key(key)?, options).await?;
        Ok(Box::new(SubfolderUpload { inner, key: key.clone() }))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let below = match self.below(folder) {
            Ok(below) => below,
            Err(error) => return Box::pin(Known::from(vec![Err(error)])),
        };
        let root = self.folder.clone();
        Box::pin(FilterMap::new(self.inner.list(Some(&below)), move |meta| relative(&root, meta)))
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let below = match self.below(folder) {
            Ok(below) => below,
            Err(error) => return Box::pin(Known::from(vec![Err(error)])),
        };
        let root = self.folder.clone();
        Box::pin(FilterMap::new(self.inner.list_folder(Some(&below)), move |entry| {
            Some(match entry {
                FolderEntry::Object(meta) => FolderEntry::Object(relative(&root, meta)?),
                FolderEntry::Folder(folder) => FolderEntry::Folder(name_in(&root, &folder)?),
            })
        }))
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let keys = keys.iter().map(|key| self.key(key)).collect::<Result<Vec<_>, _>>()?;
        self.inner.delete(&keys).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let inner = self.inner.claim(&self.key(key)?).await?;
        Ok(Arc::new(SubfolderClaim { inner, key: key.clone() }))
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        let mut found = self.inner.leftovers(Some(&self.below(folder)?), min_age, action).await?;
        for leftover in &mut found {
            let below = leftover.path.strip_prefix(self.folder.as_str());
            if let Some(name) = below.and_then(|below| below.strip_prefix('/')) {
                leftover.path = name.to_owned();
            }
        }
        Ok(found)
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        self.inner.remove_empty_folders(&self.key(folder)?).await
    }
}

#[derive(Debug)]
struct SubfolderClaim {
    inner: Arc<dyn Claim>,
    key: Key,
}

#[async_trait]
impl Claim for SubfolderClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        Ok(renamed(self.inner.replace(payload).await?, &self.key))
    }
}

#[derive(Debug)]
struct SubfolderUpload {
    inner: Box<dyn Upload>,
    key: Key,
}

#[async_trait]
impl Upload for SubfolderUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        self.inner.put_part(part)
    }

    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        Ok(renamed(self.inner.complete().await?, &self.key))
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        self.inner.abort().await
    }
}
