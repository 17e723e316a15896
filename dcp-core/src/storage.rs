//! The contract of a storage backend: keys and bytes.
//!
//! A backend author implements [`Storage`] (and [`Upload`]) and runs the suite of
//! `dcp-conformance`; every checkpoint format then works on it. Conveniences for callers are in
//! [`StorageExt`], which backends do not implement.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use bytes::Bytes;
use futures_core::Stream;

use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::key::Key;
use crate::memory::Buffer;
use crate::payload::Payload;

/// A stream of listed objects.
pub type ObjectStream = Pin<Box<dyn Stream<Item = Result<ObjectMeta, StorageError>> + Send>>;

/// Bytes at rest under [`Key`]s: a file system, a bucket, memory.
///
/// Methods are called concurrently, from any thread. Dropping a future stops waiting. Work already
/// passed to a thread or the network may still finish, but never leaves a partly written object
/// visible under its key.
///
/// A storage over a map, which passes the suite of `dcp-conformance`:
///
/// ```
/// use std::collections::BTreeMap;
/// use std::sync::{Arc, Mutex};
///
/// use async_trait::async_trait;
/// use bytes::Bytes;
/// use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind as Kind};
/// use dcp_core::error::StorageOp as Op;
/// use dcp_core::storage::{Capabilities, Claim, ObjectMeta, ObjectStream, PutMode, ReadInto, Upload};
/// use futures_util::stream;
///
/// #[derive(Clone, Debug, Default)]
/// struct MapStorage(Arc<Mutex<BTreeMap<Key, Bytes>>>);
///
/// fn error(kind: Kind, op: Op, key: &Key) -> StorageError {
///     StorageError::new(kind, op, Some(key.clone()))
/// }
///
/// #[async_trait]
/// impl Storage for MapStorage {
///     fn capabilities(&self) -> Capabilities {
///         let mut capabilities = Capabilities::none();
///         capabilities.atomic_create = true;
///         capabilities.complete_listing = true;
///         capabilities.ranged_reads = true;
///         capabilities
///     }
///
///     async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
///         let objects = self.0.lock().unwrap();
///         let bytes = objects.get(key).ok_or_else(|| error(Kind::NotFound, Op::Stat, key))?;
///         Ok(ObjectMeta::new(key.clone(), bytes.len() as u64))
///     }
///
///     async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError> {
///         let objects = self.0.lock().unwrap();
///         let bytes = objects.get(key).ok_or_else(|| error(Kind::NotFound, Op::Read, key))?;
///         let fill = |ReadInto { byte_offset, mut buffer }: ReadInto| {
///             let start = usize::try_from(byte_offset).unwrap_or(usize::MAX);
///             let range = start..start.saturating_add(buffer.len());
///             match bytes.get(range) {
///                 Some(found) => buffer.copy_from_slice(found),
///                 None if buffer.is_empty() => {}
///                 None => return Err(error(Kind::Truncated, Op::Read, key)),
///             }
///             Ok(buffer)
///         };
///         reads.into_iter().map(fill).collect()
///     }
///
///     async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError> {
///         let mut objects = self.0.lock().unwrap();
///         if mode == PutMode::Create && objects.contains_key(key) {
///             return Err(error(Kind::AlreadyExists, Op::Put, key));
///         }
///         // A copy: the pieces may be loans of a tensor's memory.
///         objects.insert(key.clone(), payload.pieces().concat().into());
///         Ok(())
///     }
///
///     async fn start_upload(&self, key: &Key, mode: PutMode) -> Result<Box<dyn Upload>, StorageError> {
///         Ok(Box::new(MapUpload { to: self.clone(), key: key.clone(), mode, bytes: Vec::new() }))
///     }
///
///     fn list(&self, prefix: Option<&Key>) -> ObjectStream {
///         let objects = self.0.lock().unwrap();
///         let found = objects.iter().filter(|(key, _)| {
///             prefix.is_none_or(|prefix| *key != prefix && key.is_under(prefix))
///         });
///         let found = found.map(|(key, bytes)| Ok(ObjectMeta::new(key.clone(), bytes.len() as u64)));
///         Box::pin(stream::iter(found.collect::<Vec<_>>()))
///     }
///
///     async fn delete(&self, key: &Key) -> Result<(), StorageError> {
///         self.0.lock().unwrap().remove(key);
///         Ok(())
///     }
///
///     async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
///         Err(error(Kind::Unsupported, Op::Claim, key))
///     }
/// }
///
/// #[derive(Debug)]
/// struct MapUpload {
///     to: MapStorage,
///     key: Key,
///     mode: PutMode,
///     bytes: Vec<u8>,
/// }
///
/// #[async_trait]
/// impl Upload for MapUpload {
///     async fn put_part(&mut self, part: Payload) -> Result<(), StorageError> {
///         part.pieces().iter().for_each(|piece| self.bytes.extend_from_slice(piece));
///         Ok(())
///     }
///
///     async fn complete(self: Box<Self>) -> Result<(), StorageError> {
///         self.to.put(&self.key, self.bytes.into(), self.mode).await
///     }
///
///     async fn abort(self: Box<Self>) -> Result<(), StorageError> {
///         Ok(())
///     }
/// }
///
/// let open = || async { Arc::new(MapStorage::default()) as _ };
/// assert!(dcp_conformance::passes(dcp_conformance::storage::trials("map", open)));
/// ```
///
/// Registered in a [`StorageRegistry`](crate::registry::StorageRegistry), it serves URLs of its
/// scheme.
#[async_trait]
pub trait Storage: fmt::Debug + Send + Sync + 'static {
    /// The abilities and preferences of this storage. Does no I/O.
    fn capabilities(&self) -> Capabilities;

    /// The size and age of an object.
    ///
    /// # Errors
    ///
    /// [`NotFound`](StorageErrorKind::NotFound) when there is no object of that key; a folder is
    /// not an object.
    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError>;

    /// Fills every buffer with the bytes of the object from its offset, and returns the buffers in
    /// the given order.
    ///
    /// A read of no bytes succeeds if the object exists. On an error, the buffers are dropped with
    /// unspecified contents.
    ///
    /// # Errors
    ///
    /// [`NotFound`](StorageErrorKind::NotFound) when the object does not exist;
    /// [`Truncated`](StorageErrorKind::Truncated) when it ends before a requested byte.
    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError>;

    /// Writes a whole object, all or nothing: its key never shows a part of it. When this returns,
    /// the object is as durable as [`Capabilities::durable`] states.
    ///
    /// # Errors
    ///
    /// [`AlreadyExists`](StorageErrorKind::AlreadyExists) with [`PutMode::Create`] when an object
    /// of that key exists; of several concurrent creators exactly one succeeds.
    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError>;

    /// Begins an object that is written in parts. It appears under its key only on
    /// [`Upload::complete`], whole: with [`PutMode::Create`] if the key is then free, with
    /// [`PutMode::Overwrite`] in place of an existing object.
    ///
    /// # Errors
    ///
    /// [`AlreadyExists`](StorageErrorKind::AlreadyExists) here or on completion, with
    /// [`PutMode::Create`], when an object of that key exists.
    async fn start_upload(&self, key: &Key, mode: PutMode)
    -> Result<Box<dyn Upload>, StorageError>;

    /// All objects, or those in the folder `prefix`, in no particular order, without unfinished
    /// uploads. A folder that does not exist has no objects.
    fn list(&self, prefix: Option<&Key>) -> ObjectStream;

    /// Removes an object. A missing object is not an error.
    async fn delete(&self, key: &Key) -> Result<(), StorageError>;

    /// Claims an object, existing or not, that the caller reads, works on and then replaces.
    ///
    /// Of overlapping claims of one object, at most one replaces it. A storage guarantees that in
    /// one of two ways: a second claim fails while the first is held, as with a file lock; or
    /// [`Claim::replace`] fails if the object changed since the claim, as with the conditional
    /// writes of an object store. A claim ends when it is dropped, and with its process. It neither
    /// prevents nor detects other writes of the object.
    ///
    /// # Errors
    ///
    /// [`Conflict`](StorageErrorKind::Conflict) when another holder has the object, with a message
    /// that names the holder; [`Unsupported`](StorageErrorKind::Unsupported) when
    /// [`Capabilities::claims`] is false.
    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError>;
}

/// The right to replace an object, from [`Storage::claim`].
#[async_trait]
pub trait Claim: fmt::Debug + Send + Sync {
    /// Writes the object like [`Storage::put`] with [`PutMode::Overwrite`]. The claim lasts until
    /// the write ends, even if this future is dropped. Can be called repeatedly.
    ///
    /// # Errors
    ///
    /// [`Conflict`](StorageErrorKind::Conflict) when the claim is lost: another holder has replaced
    /// the object or may do so.
    async fn replace(&self, payload: Payload) -> Result<(), StorageError>;
}

/// An unfinished object, from [`Storage::start_upload`].
///
/// Dropping it without [`complete`](Upload::complete) leaves no object under the key, but uploaded
/// parts may occupy space until [`abort`](Upload::abort) or the storage's own clean-up.
#[async_trait]
pub trait Upload: fmt::Debug + Send {
    /// Appends bytes, in the order of calls.
    async fn put_part(&mut self, part: Payload) -> Result<(), StorageError>;

    /// Makes the object durable and visible.
    async fn complete(self: Box<Self>) -> Result<(), StorageError>;

    /// Discards the upload.
    async fn abort(self: Box<Self>) -> Result<(), StorageError>;
}

/// One range to read: its offset in the object, and the memory to fill.
#[derive(Debug)]
pub struct ReadInto {
    /// The offset of the range in the object.
    pub byte_offset: u64,
    /// The memory, which is filled completely.
    pub buffer: Buffer,
}

/// The treatment of an existing object by a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PutMode {
    /// Fail; exactly one of several concurrent creators wins.
    Create,
    /// Replace it atomically: a reader sees the old bytes or the new ones.
    Overwrite,
}

/// Facts about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectMeta {
    /// Its name.
    pub key: Key,
    /// Its length in bytes.
    pub byte_len: u64,
    /// The time of its last write, if the storage knows it.
    pub modified: Option<SystemTime>,
}

impl ObjectMeta {
    /// An object of `byte_len` bytes and unknown age.
    #[must_use]
    pub fn new(key: Key, byte_len: u64) -> Self {
        Self { key, byte_len, modified: None }
    }

    /// Sets the time of the last write.
    #[must_use]
    pub fn with_modified(mut self, modified: Option<SystemTime>) -> Self {
        self.modified = modified;
        self
    }
}

/// The abilities and preferences of a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// [`PutMode::Create`] and uploads are atomic among concurrent creators.
    pub atomic_create: bool,
    /// [`Storage::claim`] is supported.
    pub claims: bool,
    /// What a successful call wrote survives a crash of the machine.
    pub durable: bool,
    /// [`Storage::list`] lists every object that [`Storage::stat`] finds, so an unlisted object
    /// does not exist. On a file system, a link may lead to an unlisted file.
    pub complete_listing: bool,
    /// The cost of reading a range depends on its length, not on the object's.
    pub ranged_reads: bool,
    /// Ranges with a gap below this many bytes are cheaper to read as one.
    pub coalesce_gap: u64,
    /// The number of requests to keep in flight.
    pub parallelism: u16,
}

impl Capabilities {
    /// The minimum that a storage must support.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            atomic_create: false,
            claims: false,
            durable: false,
            complete_listing: false,
            ranged_reads: false,
            coalesce_gap: 0,
            parallelism: 1,
        }
    }
}

impl Default for Capabilities {
    fn default() -> Self {
        Self::none()
    }
}

/// Conveniences for every [`Storage`].
pub trait StorageExt: Storage {
    /// Reads one range into new memory.
    ///
    /// Allocates only after checking that the object contains the range, so a range from an
    /// untrusted file cannot allocate more than the object's size.
    fn read_range(
        &self,
        key: &Key,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Bytes, StorageError>> + Send {
        async move {
            let len = range.end.saturating_sub(range.start);
            // A small allocation is harmless and saves a round trip.
            if len > 1 << 20 {
                let meta = self.stat(key).await?;
                if meta.byte_len < range.end {
                    return Err(StorageError::new(
                        StorageErrorKind::Truncated,
                        StorageOp::Read,
                        Some(key.clone()),
                    )
                    .with_message(format!(
                        "bytes {}..{} were asked for, the object has {}",
                        range.start, range.end, meta.byte_len
                    )));
                }
            }
            let buffer = usize::try_from(len).ok().and_then(Buffer::try_zeroed);
            let buffer = buffer.ok_or_else(|| {
                StorageError::new(StorageErrorKind::Other, StorageOp::Read, Some(key.clone()))
                    .with_message(format!("there is no memory for {len} bytes"))
            })?;
            let read = ReadInto { byte_offset: range.start, buffer };
            let mut buffers = self.read(key, vec![read]).await?;
            Ok(buffers.pop().map(Buffer::freeze).unwrap_or_default())
        }
    }

    /// Reads a whole object.
    fn read_all(&self, key: &Key) -> impl Future<Output = Result<Bytes, StorageError>> + Send {
        async move {
            let meta = self.stat(key).await?;
            self.read_range(key, 0..meta.byte_len).await
        }
    }

    /// Whether an object of that key exists.
    fn contains(&self, key: &Key) -> impl Future<Output = Result<bool, StorageError>> + Send {
        async move {
            match self.stat(key).await {
                Ok(_) => Ok(true),
                Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(false),
                Err(error) => Err(error),
            }
        }
    }
}

impl<S: Storage + ?Sized> StorageExt for S {}
