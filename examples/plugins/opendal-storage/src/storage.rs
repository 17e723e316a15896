//! Objects: reading, writing, deleting.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Buf as _, Bytes};
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Capabilities, Claim, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream, PutMode,
    ReadInto, ReadOutcome, ReadRequest, Upload, UploadOptions, WholeObject,
};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use opendal::{Metadata, Operator};

use crate::error::{refused, storage_error};
use crate::list;
use crate::upload::OpendalUpload;

/// Requests of one call that are in flight together.
const PARALLELISM: u16 = 8;

/// A storage over an [`Operator`] of OpenDAL.
///
/// It claims what every service has. What only some have, the caller says: nothing in OpenDAL says
/// whether `if_not_exists` holds among concurrent creators, and the service `fs`, for one, checks it
/// before it writes.
#[derive(Clone, Debug)]
pub struct OpendalStorage {
    operator: Operator,
    /// The path of every object begins so: nothing, or a folder with a slash.
    root: String,
    atomic_create: bool,
    hidden: Option<Key>,
}

impl OpendalStorage {
    /// A storage over the root of an operator, whose service makes a written object visible as a
    /// whole.
    #[must_use]
    pub fn new(operator: Operator) -> Self {
        Self { operator, root: String::new(), atomic_create: false, hidden: None }
    }

    /// The same over a folder of the operator.
    #[must_use]
    pub fn folder(mut self, folder: &Key) -> Self {
        self.root = format!("{folder}/");
        self
    }

    /// States that of several concurrent creators of an object exactly one succeeds.
    #[must_use]
    pub fn atomic_create(mut self, atomic: bool) -> Self {
        self.atomic_create = atomic;
        self
    }

    /// Hides a folder, in which the service has its temporary files, from listings.
    #[must_use]
    pub fn hide(mut self, folder: Key) -> Self {
        self.hidden = Some(folder);
        self
    }

    /// The facts about an object.
    pub(crate) async fn meta(&self, op: StorageOp, key: &Key) -> Result<ObjectMeta, StorageError> {
        let found = self.operator.stat(&self.path(key)).await;
        let found = found.map_err(|error| storage_error(op, Some(key), error))?;
        if found.is_dir() {
            return Err(refused(StorageErrorKind::NotFound, op, key));
        }
        Ok(meta(key.clone(), &found))
    }

    /// Fails if there is an object that `mode` does not replace.
    pub(crate) async fn check(
        &self,
        op: StorageOp,
        key: &Key,
        mode: &PutMode,
    ) -> Result<(), StorageError> {
        match mode {
            PutMode::Overwrite => Ok(()),
            PutMode::Create => match self.meta(op, key).await {
                Ok(_) => Err(refused(StorageErrorKind::AlreadyExists, op, key)),
                Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(()),
                Err(error) => Err(error),
            },
            _ => Err(refused(StorageErrorKind::Unsupported, op, key)),
        }
    }

    /// A copy of the bytes: a service may keep what it writes, and a payload may be a loan of a
    /// tensor's memory.
    pub(crate) fn copied(payload: &Payload) -> opendal::Buffer {
        payload.pieces().iter().map(|piece| Bytes::copy_from_slice(piece)).collect()
    }

    pub(crate) fn operator(&self) -> &Operator {
        &self.operator
    }

    /// The path of an object.
    pub(crate) fn path(&self, key: &Key) -> String {
        format!("{}{key}", self.root)
    }

    /// The path of a folder, or of the root.
    pub(crate) fn folder_path(&self, folder: Option<&Key>) -> String {
        match folder {
            Some(folder) => format!("{}{folder}/", self.root),
            None if self.root.is_empty() => "/".to_owned(),
            None => self.root.clone(),
        }
    }

    /// The key of a path; `None` for what is no object of a checkpoint.
    pub(crate) fn key(&self, path: &str) -> Option<Key> {
        let key = Key::new(path.strip_prefix(&self.root)?.trim_end_matches('/')).ok()?;
        let is_hidden = self.hidden.as_ref().is_some_and(|h| key == *h || key.is_under(h));
        (!is_hidden).then_some(key)
    }

    /// Whether a service checks the condition of [`PutMode::Create`] itself.
    pub(crate) fn creates(&self, mode: &PutMode) -> bool {
        *mode == PutMode::Create && self.operator.info().full_capability().write_with_if_not_exists
    }

    async fn read_range(&self, key: &Key, range: ReadInto) -> Result<Buffer, StorageError> {
        let ReadInto { byte_offset, mut buffer } = range;
        if buffer.is_empty() {
            return Ok(buffer);
        }
        let truncated = || refused(StorageErrorKind::Truncated, StorageOp::Read, key);
        let end = byte_offset.checked_add(buffer.len() as u64).ok_or_else(truncated)?;
        let read = self.operator.read_with(&self.path(key)).range(byte_offset..end).await;
        let mut read = read.map_err(|error| storage_error(StorageOp::Read, Some(key), error))?;
        if read.len() != buffer.len() {
            return Err(truncated());
        }
        read.copy_to_slice(&mut buffer);
        Ok(buffer)
    }
}

/// The facts about an object. Services without versions have none, so they are not passed on.
pub(crate) fn meta(key: Key, found: &Metadata) -> ObjectMeta {
    let modified = found.last_modified().map(Into::into);
    ObjectMeta::new(key, found.content_length()).with_modified(modified)
}

#[async_trait]
impl Storage for OpendalStorage {
    fn capabilities(&self) -> Capabilities {
        let service = self.operator.info().full_capability();
        let mut capabilities = Capabilities::none();
        capabilities.writable = service.write && service.delete;
        capabilities.listable = service.list;
        capabilities.atomic_create = self.atomic_create && service.write_with_if_not_exists;
        capabilities.complete_listing = service.list;
        capabilities.ranged_reads = true;
        capabilities.parallelism = PARALLELISM;
        let limits = &mut capabilities.write_limits;
        let bytes = |size: Option<usize>| size.map(|size| size as u64);
        limits.part_bytes_min = bytes(service.write_multi_min_size).unwrap_or(1);
        limits.part_bytes_max = bytes(service.write_multi_max_size).unwrap_or(u64::MAX);
        limits.put_bytes_max = bytes(service.write_total_max_size).unwrap_or(u64::MAX);
        capabilities
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        self.meta(StorageOp::Stat, key).await
    }

    async fn read(&self, key: &Key, request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        if request.if_version.is_some() {
            return Err(refused(StorageErrorKind::Unsupported, StorageOp::Read, key));
        }
        let ends =
            request.ranges.iter().map(|r| r.byte_offset.saturating_add(r.buffer.len() as u64));
        let end = ends.max().unwrap_or(0);
        if request.ranges.iter().all(|range| range.buffer.is_empty()) {
            self.meta(StorageOp::Read, key).await?;
        }
        let reads = request.ranges.into_iter().map(|range| self.read_range(key, range));
        let buffers = stream::iter(reads).buffered(PARALLELISM.into()).try_collect().await;
        match buffers {
            Ok(buffers) => Ok(ReadOutcome::new(buffers)),
            // Services report a range after the end in various ways.
            Err(error)
                if matches!(
                    error.kind(),
                    StorageErrorKind::Other | StorageErrorKind::Transient
                ) =>
            {
                let byte_len = self.meta(StorageOp::Read, key).await?.byte_len;
                let truncated = refused(StorageErrorKind::Truncated, StorageOp::Read, key);
                Err(if byte_len < end { truncated } else { error })
            }
            Err(error) => Err(error),
        }
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let meta = self.meta(StorageOp::Read, key).await?;
        if meta.byte_len > max_bytes {
            return Err(refused(StorageErrorKind::TooLarge, StorageOp::Read, key));
        }
        let read = self.operator.read_with(&self.path(key)).range(0..meta.byte_len).await;
        let read = read.map_err(|error| storage_error(StorageOp::Read, Some(key), error))?;
        let bytes = read.to_bytes();
        Ok(WholeObject::new(ObjectMeta::new(key.clone(), bytes.len() as u64), bytes))
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        if payload.len() > self.capabilities().write_limits.put_bytes_max {
            return Err(refused(StorageErrorKind::TooLarge, StorageOp::Put, key));
        }
        self.check(StorageOp::Put, key, &mode).await?;
        let byte_len = payload.len();
        let path = self.path(key);
        let write = self.operator.write_with(&path, Self::copied(&payload));
        let written = match self.creates(&mode) {
            true => write.if_not_exists(true).await,
            false => write.await,
        };
        written.map_err(|error| storage_error(StorageOp::Put, Some(key), error))?;
        Ok(ObjectMeta::new(key.clone(), byte_len))
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        let limits = self.capabilities().write_limits;
        if !(limits.part_bytes_min..=limits.part_bytes_max).contains(&options.part_bytes) {
            return Err(refused(StorageErrorKind::Invalid, StorageOp::Upload, key));
        }
        self.check(StorageOp::Upload, key, &options.mode).await?;
        let path = self.path(key);
        let writer = self.operator.writer_with(&path);
        let writer = match self.creates(&options.mode) {
            true => writer.if_not_exists(true).await,
            false => writer.await,
        };
        let writer = writer.map_err(|error| storage_error(StorageOp::Upload, Some(key), error))?;
        Ok(Box::new(OpendalUpload::start(self.clone(), key.clone(), options.mode, writer)))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        list::objects(self.clone(), folder)
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        list::entries(self.clone(), folder)
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        for key in keys {
            match self.meta(StorageOp::Delete, key).await {
                Ok(_) => {}
                Err(error) if error.kind() == StorageErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            }
            let deleted = self.operator.delete(&self.path(key)).await;
            deleted.map_err(|error| storage_error(StorageOp::Delete, Some(key), error))?;
        }
        Ok(())
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Err(refused(StorageErrorKind::Unsupported, StorageOp::Claim, key))
    }

    async fn leftovers(
        &self,
        _folder: Option<&Key>,
        _min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        // OpenDAL lists no open uploads.
        let kind = StorageErrorKind::Unsupported;
        Err(StorageError::new(kind, action.op(), None).with_message("OpenDAL lists no uploads"))
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        list::remove_empty(self, folder).await
    }
}
