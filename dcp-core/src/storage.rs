//! The contract of a storage backend: keys and bytes, nothing of tensors.
//!
//! A backend author implements [`Storage`] (and [`Upload`]) and runs the suite of
//! `dcp-conformance`; every checkpoint format then works on it. Conveniences for callers live in
//! [`StorageExt`], which nobody implements.

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
/// All methods may be called concurrently, from any thread. Dropping a future stops waiting; work
/// already handed to a thread or the network may still finish, but never leaves a partly written
/// object visible under its key.
#[async_trait]
pub trait Storage: fmt::Debug + Send + Sync + 'static {
    /// What this storage can do, and how it likes to be used. Costs nothing.
    fn capabilities(&self) -> Capabilities;

    /// Size and age of an object.
    ///
    /// # Errors
    ///
    /// [`NotFound`](StorageErrorKind::NotFound) when there is no object of that key; a folder is
    /// none.
    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError>;

    /// Fills every buffer with the bytes of the object from its offset on, and returns the
    /// buffers in the order given.
    ///
    /// A read of no bytes succeeds if the object exists. On an error, the contents of the buffers
    /// are unspecified and they are dropped.
    ///
    /// # Errors
    ///
    /// [`NotFound`](StorageErrorKind::NotFound) without the object;
    /// [`Truncated`](StorageErrorKind::Truncated) when it ends before a requested byte.
    async fn read(&self, key: &Key, reads: Vec<ReadInto>) -> Result<Vec<Buffer>, StorageError>;

    /// Writes a whole object, all or nothing: under its key there is never a part of it, and
    /// when this returns it is as durable as [`Capabilities::durable`] says.
    ///
    /// # Errors
    ///
    /// [`AlreadyExists`](StorageErrorKind::AlreadyExists) with [`PutMode::Create`] when there is
    /// an object of that key; of several concurrent creators exactly one succeeds.
    async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<(), StorageError>;

    /// Begins an object that is written in parts. It appears under its key only on
    /// [`Upload::complete`], whole: with [`PutMode::Create`] only if the key is then free, with
    /// [`PutMode::Overwrite`] in place of what is there.
    ///
    /// # Errors
    ///
    /// [`AlreadyExists`](StorageErrorKind::AlreadyExists) here or on completion with
    /// [`PutMode::Create`] when there is an object of that key.
    async fn start_upload(&self, key: &Key, mode: PutMode)
    -> Result<Box<dyn Upload>, StorageError>;

    /// All objects, or those under the folder `prefix`, in no particular order; objects that are
    /// being written are not among them. A folder that does not exist lists nothing.
    fn list(&self, prefix: Option<&Key>) -> ObjectStream;

    /// Removes an object; one that does not exist is no error.
    async fn delete(&self, key: &Key) -> Result<(), StorageError>;

    /// Claims an object that the caller reads, works on and then replaces, whether or not it exists
    /// yet.
    ///
    /// Of claims of one object that overlap, at most one replaces it. A storage keeps that in one of
    /// two ways: a second claim fails for as long as the first is held, as with a lock of a file
    /// system; or [`Claim::replace`] fails where the object is not what it was at the time of the
    /// claim, as with the conditional writes of an object store. A claim ends when it is dropped,
    /// and with the process that holds it. Other writes of the object are neither hindered nor
    /// noticed.
    ///
    /// # Errors
    ///
    /// [`Conflict`](StorageErrorKind::Conflict) when somebody else holds the object, with a message
    /// that names the holder; [`Unsupported`](StorageErrorKind::Unsupported) where
    /// [`Capabilities::claims`] is off.
    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError>;
}

/// An object that its holder alone replaces, from [`Storage::claim`].
#[async_trait]
pub trait Claim: fmt::Debug + Send + Sync {
    /// Writes the object as [`Storage::put`] with [`PutMode::Overwrite`] does. The claim lasts
    /// until the write is over, also where this future is dropped meanwhile. It can be repeated.
    ///
    /// # Errors
    ///
    /// [`Conflict`](StorageErrorKind::Conflict) when the claim is lost: another holder has replaced
    /// the object or may do so.
    async fn replace(&self, payload: Payload) -> Result<(), StorageError>;
}

/// An object in the making, from [`Storage::start_upload`].
///
/// Dropping it without [`complete`](Upload::complete) leaves no object under the key, though what
/// was sent may take space until [`abort`](Upload::abort) or the storage's own cleaning.
#[async_trait]
pub trait Upload: fmt::Debug + Send {
    /// Appends bytes. The order of calls is the order of bytes.
    async fn put_part(&mut self, part: Payload) -> Result<(), StorageError>;

    /// Makes the object durable and visible.
    async fn complete(self: Box<Self>) -> Result<(), StorageError>;

    /// Throws away what was written.
    async fn abort(self: Box<Self>) -> Result<(), StorageError>;
}

/// One range to read: where it begins in the object, and the memory to fill.
#[derive(Debug)]
pub struct ReadInto {
    /// First byte of the object to read.
    pub byte_offset: u64,
    /// Filled to its whole length.
    pub buffer: Buffer,
}

/// What a write does with an object that is already there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PutMode {
    /// Fail; exactly one of several concurrent creators wins.
    Create,
    /// Replace it atomically: a reader sees the old bytes or the new ones.
    Overwrite,
}

/// What a storage knows of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectMeta {
    /// Its name.
    pub key: Key,
    /// Its length in bytes.
    pub byte_len: u64,
    /// When it was written, where the storage knows.
    pub modified: Option<SystemTime>,
}

impl ObjectMeta {
    /// An object of `byte_len` bytes and unknown age.
    #[must_use]
    pub fn new(key: Key, byte_len: u64) -> Self {
        Self { key, byte_len, modified: None }
    }

    /// The same, last written at `modified`.
    #[must_use]
    pub fn with_modified(mut self, modified: Option<SystemTime>) -> Self {
        self.modified = modified;
        self
    }
}

/// What a storage can do beyond the least, and how it likes to be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// [`PutMode::Create`] and uploads are decided atomically among concurrent creators.
    pub atomic_create: bool,
    /// [`Storage::claim`] works.
    pub claims: bool,
    /// What a successful call wrote survives a crash of the machine.
    pub durable: bool,
    /// [`Storage::list`] lists every object that [`Storage::stat`] finds, so that one that is not
    /// listed is not there. On a file system a link may lead to a file that is not listed.
    pub complete_listing: bool,
    /// A read of a range costs about its length, not the object's.
    pub ranged_reads: bool,
    /// Two ranges that lie closer than this many bytes are cheaper to read as one.
    pub coalesce_gap: u64,
    /// How many requests are worth having in flight.
    pub parallelism: u16,
}

impl Capabilities {
    /// The least a storage may offer.
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

/// Conveniences on every [`Storage`].
pub trait StorageExt: Storage {
    /// Reads one range into memory of its own.
    ///
    /// Memory is claimed only after the object was seen to hold the range, so a range taken from
    /// an untrusted file cannot claim more than the storage really has.
    fn read_range(
        &self,
        key: &Key,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Bytes, StorageError>> + Send {
        async move {
            let len = range.end.saturating_sub(range.start);
            // A small claim is harmless and saves a round trip.
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

    /// Whether there is an object of that key.
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
