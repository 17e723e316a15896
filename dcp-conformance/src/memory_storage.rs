//! A storage in memory, for tests and short-lived programs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::error::StorageOp;
use dcp_core::storage::{Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Upload};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::stream;

/// Objects in this process's memory; clones share them.
///
/// Keeps every clause of the contract but durability. Needs no runtime: no call waits.
///
/// ```
/// use dcp_conformance::MemoryStorage;
/// use dcp_core::{Key, Storage};
/// use dcp_core::storage::{PutMode, StorageExt};
/// use futures_util::FutureExt;
///
/// let storage = MemoryStorage::new();
/// let key = Key::new("step_1/a")?;
/// storage.put(&key, "hello".into(), PutMode::Create).now_or_never().unwrap()?;
/// assert_eq!(storage.read_all(&key).now_or_never().unwrap()?, "hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct MemoryStorage {
    objects: Arc<Mutex<Objects>>,
    capabilities: Capabilities,
    /// Whether a claim excludes others; if not, its replacement fails when it is too late.
    locks: bool,
}

#[derive(Default)]
struct Objects {
    by_key: BTreeMap<Key, Object>,
    /// The number of objects written so far.
    written: u64,
    claimed: BTreeSet<Key>,
}

struct Object {
    bytes: Bytes,
    modified: SystemTime,
    version: u64,
}

impl Objects {
    /// A number that is unique among all objects that the key ever had; `None` without an object.
    fn version(&self, key: &Key) -> Option<u64> {
        self.by_key.get(key).map(|object| object.version)
    }

    fn write(&mut self, key: &Key, bytes: Bytes) -> u64 {
        self.written += 1;
        let version = self.written;
        self.by_key.insert(key.clone(), Object { bytes, modified: SystemTime::now(), version });
        version
    }
}

impl MemoryStorage {
    /// An empty storage.
    #[must_use]
    pub fn new() -> Self {
        let mut capabilities = Capabilities::none();
        capabilities.atomic_create = true;
        capabilities.claims = true;
        capabilities.complete_listing = true;
        capabilities.ranged_reads = true;
        capabilities.parallelism = 4;
        Self { objects: Arc::default(), capabilities, locks: true }
    }

    /// Declares other capabilities for the same objects, to test callers with a lesser storage. The
    /// behavior does not change.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Makes claims overlap, like those of an object store: the first one that replaces the object
    /// wins, and the others fail when they try.
    #[must_use]
    pub fn with_conditional_claims(mut self) -> Self {
        self.locks = false;
        self
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, op: StorageOp, key: &Key) -> Result<(Bytes, SystemTime), StorageError> {
        match self.objects().by_key.get(key) {
            Some(object) => Ok((object.bytes.clone(), object.modified)),
            None => Err(StorageError::new(StorageErrorKind::NotFound, op, Some(key.clone()))),
        }
    }

    fn insert(
        &self,
        op: StorageOp,
        key: &Key,
        bytes: Bytes,
        mode: PutMode,
    ) -> Result<(), StorageError> {
        let mut objects = self.objects();
        if mode == PutMode::Create && objects.by_key.contains_key(key) {
            return Err(StorageError::new(StorageErrorKind::AlreadyExists, op, Some(key.clone())));
        }
        objects.write(key, bytes);
        Ok(())
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
        let (bytes, modified) = self.get(StorageOp::Stat, key)?;
        Ok(ObjectMeta::new(key.clone(), bytes.len() as u64).with_modified(Some(modified)))
    }

    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
        let (bytes, _) = self.get(StorageOp::Read, key)?;
        reads
            .into_iter()
            .map(|ReadInto { byte_offset, mut buffer }| {
                if buffer.is_empty() {
                    return Ok(buffer);
                }
                let source = usize::try_from(byte_offset)
                    .ok()
                    .and_then(|start| bytes.get(start..start.checked_add(buffer.len())?));
                let Some(source) = source else {
                    let kind = StorageErrorKind::Truncated;
                    return Err(StorageError::new(kind, StorageOp::Read, Some(key.clone()))
                        .with_message(format!(
                            "{} bytes at {byte_offset} were asked for, the object has {}",
                            buffer.len(),
                            bytes.len()
                        )));
                };
                buffer.copy_from_slice(source);
                Ok(buffer)
            })
            .collect()
    }

    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError> {
        self.insert(StorageOp::Put, key, copied(&payload), mode)
    }

    async fn start_upload(
        &self,
        key: &Key,
        mode: PutMode,
    ) -> Result<Box<dyn Upload>, StorageError> {
        if mode == PutMode::Create && self.objects().by_key.contains_key(key) {
            let kind = StorageErrorKind::AlreadyExists;
            return Err(StorageError::new(kind, StorageOp::Upload, Some(key.clone())));
        }
        let (storage, key) = (self.clone(), key.clone());
        Ok(Box::new(MemoryUpload { storage, key, mode, bytes: Vec::new() }))
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        let found = self
            .objects()
            .by_key
            .iter()
            .filter(|(key, _)| prefix.is_none_or(|prefix| *key != prefix && key.is_under(prefix)))
            .map(|(key, object)| {
                Ok(ObjectMeta::new(key.clone(), object.bytes.len() as u64)
                    .with_modified(Some(object.modified)))
            })
            .collect::<Vec<_>>();
        Box::pin(stream::iter(found))
    }

    async fn delete(&self, key: &Key) -> Result<(), StorageError> {
        self.objects().by_key.remove(key);
        Ok(())
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let mut objects = self.objects();
        if self.locks && !objects.claimed.insert(key.clone()) {
            let kind = StorageErrorKind::Conflict;
            return Err(StorageError::new(kind, StorageOp::Claim, Some(key.clone()))
                .with_message("another claim of this process holds it"));
        }
        let seen = Mutex::new(objects.version(key));
        Ok(Arc::new(MemoryClaim { storage: self.clone(), key: key.clone(), seen }))
    }
}

#[derive(Debug)]
struct MemoryClaim {
    storage: MemoryStorage,
    key: Key,
    seen: Mutex<Option<u64>>,
}

#[async_trait]
impl Claim for MemoryClaim {
    async fn replace(&self, payload: Payload) -> Result<(), StorageError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut objects = self.storage.objects();
        if !self.storage.locks && objects.version(&self.key) != *seen {
            let kind = StorageErrorKind::Conflict;
            return Err(StorageError::new(kind, StorageOp::Put, Some(self.key.clone()))
                .with_message("it was replaced since it was claimed"));
        }
        *seen = Some(objects.write(&self.key, copied(&payload)));
        Ok(())
    }
}

impl Drop for MemoryClaim {
    fn drop(&mut self) {
        if self.storage.locks {
            self.storage.objects().claimed.remove(&self.key);
        }
    }
}

#[derive(Debug)]
struct MemoryUpload {
    storage: MemoryStorage,
    key: Key,
    mode: PutMode,
    bytes: Vec<u8>,
}

#[async_trait]
impl Upload for MemoryUpload {
    async fn put_part(&mut self, part: Payload) -> Result<(), StorageError> {
        for piece in part.pieces() {
            self.bytes.extend_from_slice(piece);
        }
        Ok(())
    }

    async fn complete(self: Box<Self>) -> Result<(), StorageError> {
        let Self { storage, key, mode, bytes } = *self;
        storage.insert(StorageOp::Upload, &key, bytes.into(), mode)
    }

    async fn abort(self: Box<Self>) -> Result<(), StorageError> {
        Ok(())
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
