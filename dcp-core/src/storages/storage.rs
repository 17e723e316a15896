//! The contract of a storage backend: keys and bytes.
//!
//! A backend author implements [`Storage`] (and [`Upload`]) and runs the suite of
//! `dcp-conformance`; every checkpoint format then works on it. Conveniences for callers are in
//! [`StorageExt`], which backends do not implement.

mod buffered_upload;
mod capabilities;
mod conditional_claim;
mod ext;
mod forward;
mod leftover;
mod object;
mod own_thread;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_core::Stream;

use crate::error::StorageError;
#[cfg(doc)]
use crate::error::StorageErrorKind;
use crate::names::key::Key;
use crate::tensors::payload::Payload;

pub use buffered_upload::BufferedUpload;
pub use capabilities::{Capabilities, WriteLimits};
pub use conditional_claim::ConditionalClaim;
pub use ext::{READ_ALL_BYTES_MAX, StorageExt};
pub use leftover::{Leftover, LeftoverAction, LeftoverKind};
pub use object::{
    FolderEntry, ObjectMeta, PutMode, ReadInto, ReadOutcome, ReadRequest, UploadOptions, Version,
    WholeObject,
};
pub use own_thread::{Lane, OwnThreads, is_own_thread, on_own_thread};

/// A stream of listed objects.
pub type ObjectStream = Pin<Box<dyn Stream<Item = Result<ObjectMeta, StorageError>> + Send>>;

/// A stream of the entries of one folder.
pub type FolderStream = Pin<Box<dyn Stream<Item = Result<FolderEntry, StorageError>> + Send>>;

/// The writing of one part of an upload.
pub type PartFuture = Pin<Box<dyn Future<Output = Result<(), StorageError>> + Send>>;

/// Bytes at rest under [`Key`]s: a file system, a bucket, memory.
///
/// Methods are called concurrently, from any thread. Dropping a future stops waiting. Work already
/// passed to a thread or the network may still finish, but never leaves a partly written object
/// visible under its key.
///
/// The pieces of a [`Payload`] may be loans of a tensor's memory, which the writer returns. A
/// storage keeps them until the write ends, and no longer than the request or the thread that it
/// passed them to needs once the future is dropped. A storage that stores the bytes in memory
/// copies them.
///
/// A storage over a map, which passes the suite of `dcp-conformance`:
///
/// ```
/// use std::collections::BTreeMap;
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
///
/// use async_trait::async_trait;
/// use dcp_core::bytes::Bytes;
/// use dcp_core::error::StorageOp as Op;
/// use dcp_core::storage::{
///     BufferedUpload, Capabilities, Claim, FolderEntry, FolderStream, Leftover,
///     LeftoverAction as Action, ObjectMeta, ObjectStream, PutMode, ReadOutcome, ReadRequest, Upload,
///     UploadOptions, WholeObject,
/// };
/// use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind as Kind};
/// use futures_util::stream;
///
/// type Result<T> = std::result::Result<T, StorageError>;
///
/// #[derive(Clone, Debug, Default)]
/// pub struct MapStorage(Arc<Mutex<BTreeMap<Key, Bytes>>>);
///
/// fn error(kind: Kind, op: Op, key: &Key) -> StorageError {
///     StorageError::new(kind, op, Some(key.clone()))
/// }
///
/// impl MapStorage {
///     fn get(&self, op: Op, key: &Key) -> Result<Bytes> {
///         self.0.lock().unwrap().get(key).cloned().ok_or_else(|| error(Kind::NotFound, op, key))
///     }
///
///     /// The objects in a folder, at any depth.
///     fn found(&self, folder: Option<&Key>) -> Vec<ObjectMeta> {
///         let objects = self.0.lock().unwrap();
///         let is_found =
///             |key: &Key| folder.is_none_or(|folder| key != folder && key.is_under(folder));
///         let found = objects.iter().filter(|(key, _)| is_found(key));
///         found.map(|(key, bytes)| ObjectMeta::new(key.clone(), bytes.len() as u64)).collect()
///     }
/// }
///
/// #[async_trait]
/// impl Storage for MapStorage {
///     fn capabilities(&self) -> Capabilities {
///         let mut all = Capabilities::none();
///         (all.writable, all.listable, all.ranged_reads) = (true, true, true);
///         (all.atomic_create, all.complete_listing) = (true, true);
///         all
///     }
///
///     async fn stat(&self, key: &Key) -> Result<ObjectMeta> {
///         Ok(ObjectMeta::new(key.clone(), self.get(Op::Stat, key)?.len() as u64))
///     }
///
///     async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome> {
///         request.fill_from(key, &self.get(Op::Read, key)?)
///     }
///
///     async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject> {
///         let (meta, bytes) = (self.stat(key).await?, self.get(Op::Read, key)?);
///         let fits = bytes.len() as u64 <= max_bytes;
///         fits.then(|| WholeObject::new(meta, bytes))
///             .ok_or_else(|| error(Kind::TooLarge, Op::Read, key))
///     }
///
///     async fn put(&self, key: &Key, payload: Payload, mode: PutMode) -> Result<ObjectMeta> {
///         let mut objects = self.0.lock().unwrap();
///         match mode {
///             PutMode::Overwrite => {}
///             PutMode::Create if !objects.contains_key(key) => {}
///             PutMode::Create => return Err(error(Kind::AlreadyExists, Op::Put, key)),
///             _ => return Err(error(Kind::Unsupported, Op::Put, key)),
///         }
///         objects.insert(key.clone(), payload.pieces().concat().into());
///         Ok(ObjectMeta::new(key.clone(), payload.len()))
///     }
///
///     async fn start_upload(&self, key: &Key, options: UploadOptions) -> Result<Box<dyn Upload>> {
///         Ok(Box::new(BufferedUpload::new(self.clone(), key.clone(), options.mode)))
///     }
///
///     fn list(&self, folder: Option<&Key>) -> ObjectStream {
///         Box::pin(stream::iter(self.found(folder).into_iter().map(Ok)))
///     }
///
///     fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
///         Box::pin(stream::iter(FolderEntry::of_objects(self.found(folder), folder).map(Ok)))
///     }
///
///     async fn delete(&self, keys: &[Key]) -> Result<()> {
///         let mut objects = self.0.lock().unwrap();
///         keys.iter().for_each(|key| drop(objects.remove(key)));
///         Ok(())
///     }
///
///     async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>> {
///         Err(error(Kind::Unsupported, Op::Claim, key))
///     }
///
///     async fn leftovers(&self, _: Option<&Key>, _: Duration, _: Action) -> Result<Vec<Leftover>> {
///         Ok(Vec::new())
///     }
///
///     async fn remove_empty_folders(&self, _: &Key) -> Result<()> {
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

    /// The size, age and version of an object.
    ///
    /// # Errors
    ///
    /// [`NotFound`](StorageErrorKind::NotFound) when there is no object of that key; a folder is
    /// not an object.
    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError>;

    /// Fills every buffer of the request with the bytes of the object from its offset.
    ///
    /// The storage merges ranges whose gap is at most [`Capabilities::coalesce_gap`] and divides
    /// long ones, so that a caller passes what it needs and no more. It keeps at most
    /// [`Capabilities::parallelism`] requests of one call in flight. A read of no bytes succeeds if
    /// the object exists. Where [`Capabilities::versions`] is true, all bytes have one version.
    ///
    /// On an error, the buffers are dropped with unspecified contents.
    ///
    /// # Errors
    ///
    /// [`NotFound`](StorageErrorKind::NotFound) when the object does not exist;
    /// [`Truncated`](StorageErrorKind::Truncated) when it ends before a requested byte;
    /// [`Changed`](StorageErrorKind::Changed) when it is replaced meanwhile or does not have the
    /// requested version.
    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError>;

    /// Reads a whole object of unknown length, with one request where the storage can.
    ///
    /// # Errors
    ///
    /// [`NotFound`](StorageErrorKind::NotFound) when the object does not exist;
    /// [`TooLarge`](StorageErrorKind::TooLarge) when it has more than `max_bytes` bytes, before
    /// memory is allocated for them.
    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError>;

    /// Writes a whole object, all or nothing: its key never shows a part of it. When this returns,
    /// the object is as durable as [`Capabilities::durable`] states. Returns the length of what was
    /// written, and its version where the storage has versions.
    ///
    /// # Errors
    ///
    /// [`AlreadyExists`](StorageErrorKind::AlreadyExists) with [`PutMode::Create`] when an object
    /// of that key exists; of several concurrent creators exactly one succeeds, also if a request
    /// is repeated because its answer was lost. [`Conflict`](StorageErrorKind::Conflict) with
    /// [`PutMode::Update`] when the object does not have that version, and
    /// [`Unsupported`](StorageErrorKind::Unsupported) when [`Capabilities::conditional_put`] is
    /// false. [`TooLarge`](StorageErrorKind::TooLarge) for more than
    /// [`WriteLimits::put_bytes_max`] bytes.
    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError>;

    /// Begins an object that is written in parts. It appears under its key only on
    /// [`Upload::complete`], whole, in the mode of the options.
    ///
    /// # Errors
    ///
    /// Those of [`put`](Self::put) for the mode, here or on completion;
    /// [`Invalid`](StorageErrorKind::Invalid) for a length of parts outside of the
    /// [`WriteLimits`].
    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError>;

    /// All objects, or those in `folder` at any depth, in no particular order, without unfinished
    /// uploads. A folder that does not exist has no objects.
    ///
    /// # Errors
    ///
    /// The stream fails with [`Unsupported`](StorageErrorKind::Unsupported) when
    /// [`Capabilities::listable`] is false.
    fn list(&self, folder: Option<&Key>) -> ObjectStream;

    /// The objects and folders directly in `folder`, or in the root, in no particular order. Each
    /// folder is listed once. The cost depends on the number of entries and not on what is below
    /// them.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    fn list_folder(&self, folder: Option<&Key>) -> FolderStream;

    /// Removes objects, with few requests where the storage can. A missing object is not an error.
    ///
    /// # Errors
    ///
    /// That of the first object that could not be removed; the others may be removed or not, and a
    /// second call continues.
    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError>;

    /// Claims an object, existing or not, that the caller reads, works on and then replaces.
    ///
    /// Of overlapping claims of one object, at most one replaces it. A storage guarantees that in
    /// one of two ways: a second claim fails while the first is held, as with a file lock; or
    /// [`Claim::replace`] fails if the object changed since the claim, as with the conditional
    /// writes of an object store, for which [`ConditionalClaim`] is an implementation. A claim ends
    /// when it is dropped, and with its process. The second way also detects other writes of the
    /// object; the first does not.
    ///
    /// # Errors
    ///
    /// [`Conflict`](StorageErrorKind::Conflict) when another holder has the object, with a message
    /// that names the holder; [`Unsupported`](StorageErrorKind::Unsupported) when
    /// [`Capabilities::claims`] is false.
    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError>;

    /// Lists the remains of uploads that did not finish, everywhere or in `folder`: temporary files and
    /// parts of uploads that began at least `min_age` ago and whose process, as far as can be seen,
    /// no longer runs. [`LeftoverAction::Remove`] removes them, too.
    ///
    /// The times are those of the storage's clock. What its clock dates in the future has the age zero.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](StorageErrorKind::Unsupported) when the storage cannot list what is left.
    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError>;

    /// Removes `folder` and the folders in it, as far as they are empty, where the storage has
    /// folders without objects. One that gets an object meanwhile stays, and so do the object and
    /// what is linked to. Does nothing in other storages.
    ///
    /// # Errors
    ///
    /// When an empty folder cannot be removed.
    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError>;
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
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError>;
}

/// An unfinished object, from [`Storage::start_upload`].
///
/// Dropping it without [`complete`](Upload::complete) leaves no object under the key, but uploaded
/// parts may occupy space until [`abort`](Upload::abort), [`Storage::leftovers`] or the
/// storage's own clean-up.
#[async_trait]
pub trait Upload: fmt::Debug + Send {
    /// Appends bytes: the order of calls is the order of parts. Every part but the last has
    /// [`UploadOptions::part_bytes`] bytes.
    ///
    /// The returned futures write their parts, and may run concurrently and end in any order. A
    /// part is written as a whole or not at all. If one fails, or is dropped before it ends,
    /// [`complete`](Upload::complete) fails or writes the part itself; an object never lacks a
    /// part.
    fn put_part(&mut self, part: Payload) -> PartFuture;

    /// Makes the object durable and visible. All parts have been written.
    ///
    /// # Errors
    ///
    /// Those of [`Storage::put`] for the mode; that of a part which was not written.
    async fn complete(self: Box<Self>) -> Result<ObjectMeta, StorageError>;

    /// Discards the upload, and the parts that are still being written.
    async fn abort(self: Box<Self>) -> Result<(), StorageError>;
}
