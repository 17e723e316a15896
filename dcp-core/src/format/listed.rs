//! A storage with a listing: names and lengths cost no request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use super::listing::Listing;
use crate::error::{StorageError, StorageErrorKind, StorageOp};
use crate::names::key::Key;
use crate::storages::storage::{
    Claim, FolderEntry, FolderStream, ObjectMeta, ObjectStream, PutMode, ReadInto, ReadOutcome,
    ReadRequest, Storage, Upload, UploadOptions, Version, WholeObject,
};
use crate::storages::streams::{FilterMap, Known};
use crate::tensors::payload::Payload;

/// A storage to read, with the names and lengths of a [`Listing`]: a `stat` costs no request, and
/// neither do small files that were read whole to recognize the folder. Where the listing may lack a
/// file ([`Listing::is_complete`]), the storage looks up files that are not
/// listed.
///
/// Where `inner` has versions, every object has one for as long as this storage exists: the one of
/// this listing or of [`Storage::list_folder`], or that of the first read. Later reads of an object
/// that was replaced fail
/// with [`Changed`](StorageErrorKind::Changed), unless it was written through this storage.
///
/// Writes go to the storage and do not change the listing.
#[derive(Debug)]
pub struct ListedStorage {
    inner: Arc<dyn Storage>,
    listing: Arc<Listing>,
    /// Versions of objects without one in the listing; `None` for an object that was written
    /// through this storage.
    seen: Arc<Mutex<Seen>>,
}

type Seen = BTreeMap<Key, Option<Version>>;

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ListedStorage {
    /// `inner`, which was listed.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, listing: Arc<Listing>) -> Self {
        Self { inner, listing, seen: Arc::default() }
    }

    /// `inner` without a listing: only the versions of its objects are kept.
    #[must_use]
    pub fn unlisted(inner: Arc<dyn Storage>) -> Self {
        Self::new(inner, Arc::default())
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        lock(&self.seen)
    }

    /// The version that reads of an object require.
    fn required(&self, key: &Key) -> Option<Version> {
        if let Some(version) = self.seen().get(key) {
            return version.clone();
        }
        self.listing.get(key)?.version.clone()
    }

    /// Stores the version of the first read.
    fn remember(&self, key: &Key, version: Option<&Version>) {
        let is_listed = self.listing.get(key).is_some_and(|meta| meta.version.is_some());
        if let (false, Some(version)) = (is_listed, version) {
            self.seen().entry(key.clone()).or_insert_with(|| Some(version.clone()));
        }
    }

    /// A listing of `inner`, whose versions are remembered as those of a first read are.
    fn remembered(&self, entries: FolderStream) -> FolderStream {
        let (seen, listing) = (Arc::clone(&self.seen), Arc::clone(&self.listing));
        Box::pin(FilterMap::new(entries, move |entry| {
            if let FolderEntry::Object(ObjectMeta { key, version: Some(version), .. }) = &entry
                && listing.get(key).is_none_or(|listed| listed.version.is_none())
            {
                let mut seen = lock(&seen);
                if seen.len() < Listing::OBJECTS_MAX {
                    seen.entry(key.clone()).or_insert_with(|| Some(version.clone()));
                }
            }
            Some(entry)
        }))
    }

    /// Requires no version of an object from now on.
    fn forget(&self, key: &Key) {
        self.seen().insert(key.clone(), None);
    }
}

/// The requested bytes, if the listing has all of them.
fn inside<'a>(read: &ReadInto, bytes: &'a [u8]) -> Option<&'a [u8]> {
    let begin = usize::try_from(read.byte_offset).ok()?;
    bytes.get(begin..begin.checked_add(read.buffer.len())?)
}

fn changed(key: &Key) -> StorageError {
    StorageError::new(StorageErrorKind::Changed, StorageOp::Read, Some(key.clone()))
        .with_message("it was replaced after the checkpoint was opened; open the checkpoint again")
}

#[async_trait]
impl Storage for ListedStorage {
    crate::forward_storage!(inner: capabilities, leftovers, remove_empty_folders);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        match self.listing.get(key) {
            Some(meta) => Ok(meta.clone()),
            None if self.listing.is_complete() => Err(StorageError::new(
                StorageErrorKind::NotFound,
                StorageOp::Stat,
                Some(key.clone()),
            )),
            None => {
                let meta = self.inner.stat(key).await?;
                self.remember(key, meta.version.as_ref());
                Ok(meta)
            }
        }
    }

    async fn read(&self, key: &Key, mut request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let meta = self.listing.get(key);
        let known = self.listing.peeked(key);
        if let Some(bytes) = known.filter(|b| meta.map(|m| m.byte_len) == Some(b.len() as u64))
            && request.ranges.iter().all(|read| inside(read, bytes).is_some())
        {
            let filled = request.ranges.into_iter().map(|mut read| {
                if let Some(range) = inside(&read, bytes) {
                    read.buffer.copy_from_slice(range);
                }
                read.buffer
            });
            let version = meta.and_then(|meta| meta.version.clone());
            return Ok(ReadOutcome::new(filled.collect()).with_version(version));
        }
        if request.if_version.is_some() {
            return self.inner.read(key, request).await;
        }
        let required = self.required(key);
        request.if_version.clone_from(&required);
        let outcome = self.inner.read(key, request).await.map_err(|error| {
            let is_changed = error.kind() == StorageErrorKind::Changed;
            if is_changed { changed(key).with_source(error) } else { error }
        })?;
        if required.is_none() {
            self.remember(key, outcome.version.as_ref());
        }
        Ok(outcome)
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        if let (Some(meta), Some(bytes)) = (self.listing.get(key), self.listing.peeked(key))
            && meta.byte_len == bytes.len() as u64
            && meta.byte_len <= max_bytes
        {
            return Ok(WholeObject::new(meta.clone(), bytes.clone()));
        }
        let whole = self.inner.read_whole(key, max_bytes).await?;
        match (self.required(key), &whole.meta.version) {
            (Some(required), Some(version)) if required != *version => Err(changed(key)),
            (Some(_), _) => Ok(whole),
            (None, version) => {
                self.remember(key, version.as_ref());
                Ok(whole)
            }
        }
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.forget(key);
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.forget(key);
        self.inner.start_upload(key, options).await
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        if self.listing.is_truncated() || !self.listing.is_listed() {
            return self.inner.list(folder);
        }
        let below = |meta: &&ObjectMeta| folder.is_none_or(|folder| meta.key.is_under(folder));
        let objects = self.listing.objects().iter().filter(below);
        Box::pin(Known::from(objects.cloned().map(Ok).collect::<Vec<_>>()))
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        if self.listing.is_truncated() || !self.listing.is_listed() {
            return self.remembered(self.inner.list_folder(folder));
        }
        let found = match folder {
            Some(folder) => self.listing.root().folder(folder.as_str()),
            None => Some(self.listing.root()),
        };
        let entries = found.into_iter().flat_map(|folder| folder.entries());
        let entries = entries.filter_map(|entry| match entry {
            super::ListingEntry::File(_, meta) => Some(Ok(FolderEntry::Object(meta.clone()))),
            super::ListingEntry::Folder(folder) => {
                Some(Ok(FolderEntry::Folder(Key::new(folder.path()).ok()?)))
            }
        });
        Box::pin(Known::from(entries.collect::<Vec<_>>()))
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        keys.iter().for_each(|key| self.forget(key));
        self.inner.delete(keys).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.forget(key);
        self.inner.claim(key).await
    }
}
