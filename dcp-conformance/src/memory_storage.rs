//! A storage in memory, for tests and short-lived programs.

mod upload;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Capabilities, Claim, ConditionalClaim, FolderEntry, FolderStream, Leftover, LeftoverAction,
    ObjectMeta, ObjectStream, PutMode, ReadOutcome, ReadRequest, Upload, UploadOptions, Version,
    WholeObject,
};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::stream;

use upload::MemoryUpload;

/// Objects in this process's memory; clones share them.
///
/// Keeps every clause of the contract but durability, versions and conditional puts included. Needs
/// no runtime: no call waits.
///
/// ```
/// use dcp_conformance::MemoryStorage;
/// use dcp_core::{Key, Storage};
/// use dcp_core::storage::PutMode;
/// use futures_util::FutureExt;
///
/// let storage = MemoryStorage::new();
/// let key = Key::new("step_1/a")?;
/// storage.put(&key, "hello".into(), PutMode::Create).now_or_never().unwrap()?;
/// let whole = storage.read_whole(&key, 100).now_or_never().unwrap()?;
/// assert_eq!(whole.bytes, "hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct MemoryStorage {
    objects: Arc<Mutex<Objects>>,
    capabilities: Capabilities,
    /// Whether a claim excludes others; if not, its replacement fails when it is too late.
    locks: bool,
    clock: Arc<dyn Fn() -> SystemTime + Send + Sync>,
}

#[derive(Default)]
struct Objects {
    by_key: BTreeMap<Key, Object>,
    /// The number of objects written so far.
    written: u64,
    claimed: BTreeSet<Key>,
}

#[derive(Clone)]
struct Object {
    bytes: Bytes,
    modified: SystemTime,
    /// A number that is unique among all objects of the storage.
    version: u64,
}

impl Object {
    fn version(&self) -> Version {
        Version::new(self.version.to_string())
    }

    fn meta(&self, key: &Key) -> ObjectMeta {
        ObjectMeta::new(key.clone(), self.bytes.len() as u64)
            .with_modified(Some(self.modified))
            .with_version(Some(self.version()))
    }
}

impl Objects {
    fn write(&mut self, key: &Key, bytes: Bytes, modified: SystemTime) -> ObjectMeta {
        self.written += 1;
        let object = Object { bytes, modified, version: self.written };
        let meta = object.meta(key);
        self.by_key.insert(key.clone(), object);
        meta
    }

    /// Whether an object of that key may be written.
    fn check(&self, op: StorageOp, key: &Key, mode: &PutMode) -> Result<(), StorageError> {
        let found = self.by_key.get(key);
        let (kind, message) = match (mode, found) {
            (PutMode::Overwrite, _) | (PutMode::Create, None) => return Ok(()),
            (PutMode::Update(expected), Some(object)) if object.version() == *expected => {
                return Ok(());
            }
            (PutMode::Create, Some(_)) => (StorageErrorKind::AlreadyExists, None),
            (PutMode::Update(expected), found) => {
                let found = found.map_or("none".to_owned(), |object| object.version.to_string());
                let message = format!("version {expected:?} is to be replaced, it has {found}");
                (StorageErrorKind::Conflict, Some(message))
            }
            _ => (StorageErrorKind::Unsupported, None),
        };
        let error = StorageError::new(kind, op, Some(key.clone()));
        Err(message.into_iter().fold(error, StorageError::with_message))
    }
}

impl MemoryStorage {
    /// An empty storage.
    #[must_use]
    pub fn new() -> Self {
        let mut capabilities = Capabilities::none();
        capabilities.writable = true;
        capabilities.listable = true;
        capabilities.atomic_create = true;
        capabilities.conditional_put = true;
        capabilities.claims = true;
        capabilities.versions = true;
        capabilities.complete_listing = true;
        capabilities.ranged_reads = true;
        capabilities.parallelism = 4;
        Self {
            objects: Arc::default(),
            capabilities,
            locks: true,
            clock: Arc::new(SystemTime::now),
        }
    }

    /// Declares other capabilities for the same objects, to test callers with a lesser storage. The
    /// write limits and the absence of conditional writes hold; otherwise the behavior does not
    /// change.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Makes claims overlap, like those of an object store: they are
    /// [`ConditionalClaim`](dcp_core::storage::ConditionalClaim)s.
    #[must_use]
    pub fn conditional_claims(mut self) -> Self {
        self.locks = false;
        self
    }

    /// Takes the times of objects from `clock`, for tests in which it matters whether one object is
    /// older than another: the clock of a store may have whole seconds.
    #[must_use]
    pub fn clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, op: StorageOp, key: &Key) -> Result<Object, StorageError> {
        match self.objects().by_key.get(key) {
            Some(object) => Ok(object.clone()),
            None => Err(StorageError::new(StorageErrorKind::NotFound, op, Some(key.clone()))),
        }
    }

    fn insert(
        &self,
        op: StorageOp,
        key: &Key,
        bytes: Bytes,
        mode: &PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let limits = self.capabilities.write_limits;
        let len_max = match op {
            StorageOp::Put => limits.object_bytes_max.min(limits.put_bytes_max),
            _ => limits.object_bytes_max,
        };
        if bytes.len() as u64 > len_max {
            return Err(StorageError::new(StorageErrorKind::TooLarge, op, Some(key.clone()))
                .with_message(format!("{} bytes, at most {len_max} are allowed", bytes.len())));
        }
        self.refuse_update(op, key, mode)?;
        let mut objects = self.objects();
        objects.check(op, key, mode)?;
        Ok(objects.write(key, bytes, (self.clock)()))
    }

    fn refuse_update(&self, op: StorageOp, key: &Key, mode: &PutMode) -> Result<(), StorageError> {
        if matches!(mode, PutMode::Update(_)) && !self.capabilities.conditional_put {
            let kind = StorageErrorKind::Unsupported;
            return Err(StorageError::new(kind, op, Some(key.clone())));
        }
        Ok(())
    }

    fn found(&self, folder: Option<&Key>) -> Vec<ObjectMeta> {
        let objects = self.objects();
        let is_found = |key: &Key| folder.is_none_or(|f| key != f && key.is_under(f));
        let found = objects.by_key.iter().filter(|(key, _)| is_found(key));
        found.map(|(key, object)| object.meta(key)).collect()
    }
}

impl Default for MemoryStorage {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStorage").field("objects", &self.objects().by_key.len()).finish()
    }
}

/// Always copies: keeping the caller's pieces would extend a loan of its memory for the object's
/// lifetime.
fn copied(payload: &Payload) -> Bytes {
    payload.pieces().concat().into()
}

#[async_trait]
impl Storage for MemoryStorage {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        Ok(self.get(StorageOp::Stat, key)?.meta(key))
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let object = self.get(StorageOp::Read, key)?;
        if request.if_version.as_ref().is_some_and(|required| *required != object.version()) {
            let kind = StorageErrorKind::Changed;
            return Err(StorageError::new(kind, StorageOp::Read, Some(key.clone())));
        }
        let read = request.fill_from(key, &object.bytes)?;
        Ok(read.with_version(Some(object.version())))
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let object = self.get(StorageOp::Read, key)?;
        let meta = object.meta(key);
        if meta.byte_len > max_bytes {
            let kind = StorageErrorKind::TooLarge;
            return Err(StorageError::new(kind, StorageOp::Read, Some(key.clone())).with_message(
                format!("it has {} bytes, at most {max_bytes} are read", meta.byte_len),
            ));
        }
        Ok(WholeObject::new(meta, object.bytes))
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.insert(StorageOp::Put, key, copied(&payload), &mode)
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.refuse_update(StorageOp::Upload, key, &options.mode)?;
        self.objects().check(StorageOp::Upload, key, &options.mode)?;
        Ok(Box::new(MemoryUpload::new(self.clone(), key.clone(), options)?))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        Box::pin(stream::iter(self.found(folder).into_iter().map(Ok)))
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        Box::pin(stream::iter(FolderEntry::of_objects(self.found(folder), folder).map(Ok)))
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let mut objects = self.objects();
        for key in keys {
            objects.by_key.remove(key);
        }
        Ok(())
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        if !self.locks {
            return Ok(Arc::new(ConditionalClaim::take(Arc::new(self.clone()), key).await?));
        }
        if !self.objects().claimed.insert(key.clone()) {
            let kind = StorageErrorKind::Conflict;
            return Err(StorageError::new(kind, StorageOp::Claim, Some(key.clone()))
                .with_message("another claim of this process holds it"));
        }
        Ok(Arc::new(MemoryClaim { storage: self.clone(), key: key.clone() }))
    }

    async fn leftovers(
        &self,
        _: Option<&Key>,
        _: Duration,
        _: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        Ok(Vec::new())
    }

    async fn remove_empty_folders(&self, _: &Key) -> Result<(), StorageError> {
        Ok(())
    }
}

#[derive(Debug)]
struct MemoryClaim {
    storage: MemoryStorage,
    key: Key,
}

#[async_trait]
impl Claim for MemoryClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        self.storage.insert(StorageOp::Put, &self.key, copied(&payload), &PutMode::Overwrite)
    }
}

impl Drop for MemoryClaim {
    fn drop(&mut self) {
        self.storage.objects().claimed.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use dcp_core::HostMemory;
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn an_object_does_not_hold_on_to_the_memory_it_was_written_from() {
        let storage = MemoryStorage::new();
        let memory = HostMemory::zeroed(16);
        let payload = Payload::from(memory.read().unwrap());
        let key = Key::new("a").unwrap();
        storage.put(&key, payload, PutMode::Create).now_or_never().unwrap().unwrap();
        assert!(memory.lend(0..16).is_ok());
    }
}
