//! Storages that each break one promise.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use dcp_core::error::StorageOp;
use dcp_core::storage::{
    Claim, FolderEntry, FolderStream, Leftover, LeftoverAction, ObjectMeta, ObjectStream,
    PartFuture, PutMode, ReadInto, ReadOutcome, ReadRequest, StorageExt, Upload, UploadOptions,
    Version, WholeObject,
};
use dcp_core::{Buffer, Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::MemoryStorage;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Flaw {
    LooksBeforeItCreates,
    CreateReplaces,
    OverwriteRefuses,
    WritesInSteps,
    DropsTheLastPiece,
    ClampsReads,
    SortsReads,
    ReadsAbsentAsEmpty,
    LosesBuffersOfNothing,
    ListsByText,
    ListsNothingEmpty,
    ListsUploads,
    ListsUpTo(usize),
    ListsFoldersUpTo(usize),
    ListsTheFolder,
    ListsTheFolderInIt,
    FailsOnAbsentFolder,
    DeleteFailsOnAbsent,
    DeletesFolders,
    UploadsAtOnce,
    UploadReplaces,
    DropCompletes,
    EscapesKeys,
    AnonymousErrors,
    KeepsLoans,
    ClaimsKeepNobodyOut,
    ClaimsOutliveTheirHolder,
    ClaimsAreListed,
    ClaimsAreOfTheStorage,
    ReturnsNoLength,
    VersionsStay,
    IgnoresVersionsOfReads,
    ReadsRangeByRange,
    UpdatesAnyVersion,
    LooksBeforeItUpdates,
    ReadsWholeWithoutLimit,
    ListsFoldersDeep,
    ListsFoldersTwice,
    DeletesTheFirstThousand,
    /// Which keys of a call stay: one of `every`, from `first` on.
    DeletesAllBut {
        first: usize,
        every: usize,
    },
    KeepsPayloads,
    KeepsParts,
    PartsInOrderOfTheirEnds,
    LosesDroppedParts,
    LeftoversAreEverything,
    FoldersGoWithTheirObjects,
    TakesPartsOfAnyLength,
}

#[derive(Clone, Debug)]
pub(super) struct Flawed {
    inner: Arc<MemoryStorage>,
    flaw: Flaw,
    /// Memory of failed reads that is never given back.
    kept: Arc<std::sync::Mutex<Vec<ReadInto>>>,
    /// Claims that are never given back.
    claims: Arc<std::sync::Mutex<Vec<Arc<dyn Claim>>>>,
    /// Payloads that are never given back.
    payloads: Arc<std::sync::Mutex<Vec<Payload>>>,
}

impl Flawed {
    pub(super) fn new(flaw: Flaw) -> Self {
        let mut capabilities = MemoryStorage::new().capabilities();
        if flaw == Flaw::TakesPartsOfAnyLength {
            capabilities.write_limits.part_bytes_min = 100;
        }
        let inner = Arc::new(MemoryStorage::new().with_capabilities(capabilities));
        let (kept, claims, payloads) = (Arc::default(), Arc::default(), Arc::default());
        Self { inner, flaw, kept, claims, payloads }
    }

    fn has(&self, flaw: Flaw) -> bool {
        self.flaw == flaw
    }

    /// Returns the metadata of an object as callers see it.
    fn seen(&self, meta: ObjectMeta) -> ObjectMeta {
        match self.flaw {
            Flaw::ReturnsNoLength => ObjectMeta::new(meta.key, 0).with_version(meta.version),
            Flaw::VersionsStay => meta.with_version(Some(Version::new("same"))),
            _ => meta,
        }
    }

    async fn put_flawed(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        match (self.flaw, mode) {
            (Flaw::KeepsPayloads, mode) => {
                self.payloads.lock().unwrap().push(payload.clone());
                self.inner.put(key, payload, mode).await
            }
            (Flaw::UpdatesAnyVersion, PutMode::Update(_)) => {
                self.inner.put(key, payload, PutMode::Overwrite).await
            }
            (Flaw::LooksBeforeItUpdates, PutMode::Update(version)) => {
                let found = self.inner.stat(key).await.ok().and_then(|meta| meta.version);
                if found != Some(version) {
                    let kind = StorageErrorKind::Conflict;
                    return Err(StorageError::new(kind, StorageOp::Put, Some(key.clone())));
                }
                tokio::task::yield_now().await;
                self.inner.put(key, payload, PutMode::Overwrite).await
            }
            (Flaw::LooksBeforeItCreates, PutMode::Create) => {
                let taken = self.inner.contains(key).await?;
                tokio::task::yield_now().await;
                let mode = if taken { PutMode::Create } else { PutMode::Overwrite };
                self.inner.put(key, payload, mode).await
            }
            (Flaw::CreateReplaces, _) => self.inner.put(key, payload, PutMode::Overwrite).await,
            (Flaw::OverwriteRefuses, _) => self.inner.put(key, payload, PutMode::Create).await,
            (Flaw::WritesInSteps, mode @ PutMode::Overwrite) if payload.pieces().len() > 1 => {
                let old = self.inner.read_all(key).await.unwrap_or_default();
                let new = payload.to_bytes();
                let half = new.len() / 2;
                let torn = [&new[..half], old.get(half..).unwrap_or_default()].concat();
                self.inner.put(key, torn.into(), mode.clone()).await?;
                // The readers that the clause has beside it come to read meanwhile.
                for _ in 0..64 {
                    tokio::task::yield_now().await;
                }
                self.inner.put(key, payload, mode).await
            }
            (Flaw::DropsTheLastPiece, mode) if payload.pieces().len() > 1 => {
                let pieces = payload.pieces();
                let payload = pieces[..pieces.len() - 1].iter().cloned().collect();
                self.inner.put(key, payload, mode).await
            }
            (_, mode) => self.inner.put(key, payload, mode).await,
        }
    }

    fn name(&self, key: &Key) -> Key {
        if self.has(Flaw::EscapesKeys) {
            return Key::new(key.as_str().replace(' ', "%20")).unwrap();
        }
        key.clone()
    }
}

#[async_trait]
impl Storage for Flawed {
    dcp_core::forward_storage!(inner: capabilities);

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        let meta = self.inner.stat(&self.name(key)).await.map_err(|error| {
            let shown = (!self.has(Flaw::AnonymousErrors)).then(|| key.clone());
            StorageError::new(error.kind(), StorageOp::Stat, shown)
        })?;
        Ok(self.seen(meta.with_key(key.clone())))
    }

    async fn read(&self, key: &Key, mut request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        let key = &self.name(key);
        let reads = &mut request.ranges;
        if reads.is_empty() && self.has(Flaw::ReadsAbsentAsEmpty) {
            return Ok(ReadOutcome::new(Vec::new()));
        }
        match self.flaw {
            Flaw::ClampsReads if self.inner.contains(key).await? => {
                let len = self.inner.stat(key).await?.byte_len;
                for read in reads {
                    read.byte_offset = read.byte_offset.min(len);
                    let left = (len - read.byte_offset).min(read.buffer.len() as u64) as usize;
                    read.buffer = Buffer::zeroed(left);
                }
            }
            Flaw::SortsReads => reads.sort_by_key(|read| read.byte_offset),
            Flaw::LosesBuffersOfNothing => reads.retain(|read| !read.buffer.is_empty()),
            Flaw::KeepsLoans if !self.inner.contains(key).await? => {
                self.kept.lock().unwrap().extend(reads.drain(..));
            }
            Flaw::IgnoresVersionsOfReads => request.if_version = None,
            Flaw::ReadsRangeByRange => {
                let mut all = self.inner.read(key, ReadRequest::default()).await?;
                for read in std::mem::take(reads) {
                    all.buffers.extend(self.inner.read(key, vec![read].into()).await?.buffers);
                    tokio::task::yield_now().await;
                }
                return Ok(all);
            }
            _ => {}
        }
        self.inner.read(key, request).await
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        let max_bytes = if self.has(Flaw::ReadsWholeWithoutLimit) { u64::MAX } else { max_bytes };
        let whole = self.inner.read_whole(&self.name(key), max_bytes).await?;
        Ok(WholeObject::new(whole.meta.with_key(key.clone()), whole.bytes))
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let meta = self.put_flawed(&self.name(key), payload, mode).await?;
        Ok(self.seen(meta.with_key(key.clone())))
    }

    async fn start_upload(
        &self,
        key: &Key,
        mut options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        if self.has(Flaw::TakesPartsOfAnyLength) {
            options.part_bytes = options.part_bytes.max(100);
        }
        let inner = match self.flaw {
            Flaw::UploadReplaces | Flaw::PartsInOrderOfTheirEnds | Flaw::LosesDroppedParts => None,
            _ => Some(self.inner.start_upload(key, options).await?),
        };
        if self.has(Flaw::ListsUploads) {
            let part = key.join("part").unwrap();
            self.inner.put(&part, "".into(), PutMode::Overwrite).await?;
        }
        let (storage, key) = (self.clone(), key.clone());
        Ok(Box::new(FlawedUpload { inner, storage, key, calls: 0, sent: Arc::default() }))
    }

    fn list(&self, prefix: Option<&Key>) -> ObjectStream {
        let all = self.inner.list(None);
        match (self.flaw, prefix.cloned()) {
            (Flaw::ListsByText, Some(prefix)) => Box::pin(all.try_filter(move |meta| {
                std::future::ready(meta.key.as_str().starts_with(prefix.as_str()))
            })),
            (Flaw::ListsNothingEmpty, prefix) => Box::pin(
                self.inner
                    .list(prefix.as_ref())
                    .try_filter(|meta| std::future::ready(meta.byte_len > 0)),
            ),
            (Flaw::ListsUpTo(max), prefix) => Box::pin(self.inner.list(prefix.as_ref()).take(max)),
            (Flaw::ListsTheFolder, Some(prefix)) => {
                let folder = stream::iter([Ok(ObjectMeta::new(prefix.clone(), 0))]);
                Box::pin(folder.chain(self.inner.list(Some(&prefix))))
            }
            (Flaw::FailsOnAbsentFolder, Some(prefix)) => {
                let inner = self.inner.list(Some(&prefix));
                Box::pin(
                    stream::once(async move {
                        let found = inner.try_collect::<Vec<_>>().await?;
                        if found.is_empty() {
                            let kind = StorageErrorKind::NotFound;
                            return Err(StorageError::new(kind, StorageOp::List, Some(prefix)));
                        }
                        Ok(stream::iter(found.into_iter().map(Ok)))
                    })
                    .try_flatten(),
                )
            }
            (_, prefix) => self.inner.list(prefix.as_ref()),
        }
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        match self.flaw {
            Flaw::ListsFoldersUpTo(max) => Box::pin(self.inner.list_folder(folder).take(max)),
            Flaw::ListsTheFolderInIt => {
                let itself = folder.map(|folder| Ok(FolderEntry::Folder(folder.clone())));
                Box::pin(stream::iter(itself).chain(self.inner.list_folder(folder)))
            }
            Flaw::ListsFoldersDeep => Box::pin(self.inner.list(folder).map_ok(FolderEntry::Object)),
            Flaw::ListsFoldersTwice => {
                let entries = self.inner.list_folder(folder).map_ok(|entry| {
                    let times = if matches!(entry, FolderEntry::Folder(_)) { 2 } else { 1 };
                    stream::iter(vec![entry; times].into_iter().map(Ok))
                });
                Box::pin(entries.try_flatten())
            }
            _ => self.inner.list_folder(folder),
        }
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        let mut keys = keys.iter().map(|key| self.name(key)).collect::<Vec<_>>();
        for key in &keys {
            if self.has(Flaw::DeleteFailsOnAbsent) {
                self.inner.stat(key).await?;
            }
            if self.has(Flaw::DeletesFolders) {
                let below = self.inner.list(Some(key)).map_ok(|meta| meta.key);
                self.inner.delete(&below.try_collect::<Vec<_>>().await?).await?;
            }
        }
        match self.flaw {
            Flaw::DeletesTheFirstThousand => keys.truncate(1000),
            Flaw::DeletesAllBut { first, every } => {
                let mut number = 0;
                keys.retain(|_| {
                    number += 1;
                    number <= first || (number - 1 - first) % every != 0
                });
            }
            _ => {}
        }
        self.inner.delete(&keys).await
    }

    async fn leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
        action: LeftoverAction,
    ) -> Result<Vec<Leftover>, StorageError> {
        if self.has(Flaw::LeftoversAreEverything) {
            let all = self.inner.list(folder).map_ok(|meta| meta.key);
            self.inner.delete(&all.try_collect::<Vec<_>>().await?).await?;
        }
        self.inner.leftovers(folder, min_age, action).await
    }

    async fn remove_empty_folders(&self, folder: &Key) -> Result<(), StorageError> {
        if self.has(Flaw::FoldersGoWithTheirObjects) {
            let all = self.inner.list(Some(folder)).map_ok(|meta| meta.key);
            self.inner.delete(&all.try_collect::<Vec<_>>().await?).await?;
        }
        self.inner.remove_empty_folders(folder).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        let key = match self.flaw {
            Flaw::ClaimsAreOfTheStorage => Key::new("all").unwrap(),
            _ => self.name(key),
        };
        if self.has(Flaw::ClaimsKeepNobodyOut) {
            return Ok(Arc::new(FlawedClaim { storage: self.clone(), key }));
        }
        if self.has(Flaw::ClaimsAreListed) {
            let lock = Key::new(format!("{key}.lock"))?;
            self.inner.put(&lock, "".into(), PutMode::Overwrite).await?;
        }
        let claim = self.inner.claim(&key).await?;
        if self.has(Flaw::ClaimsOutliveTheirHolder) {
            self.claims.lock().unwrap().push(Arc::clone(&claim));
        }
        Ok(claim)
    }
}

#[derive(Debug)]
struct FlawedClaim {
    storage: Flawed,
    key: Key,
}

#[async_trait]
impl Claim for FlawedClaim {
    async fn replace(&self, payload: Payload) -> Result<ObjectMeta, StorageError> {
        self.storage.inner.put(&self.key, payload, PutMode::Overwrite).await
    }
}

#[derive(Debug)]
struct FlawedUpload {
    inner: Option<Box<dyn Upload>>,
    storage: Flawed,
    key: Key,
    calls: usize,
    /// Parts, by the number of their call or in the order of their ends.
    sent: Arc<std::sync::Mutex<BTreeMap<usize, Payload>>>,
}

impl FlawedUpload {
    fn sent(&self) -> Payload {
        let sent = self.sent.lock().unwrap();
        sent.values().flat_map(|part| part.pieces().iter().cloned()).collect()
    }
}

#[async_trait]
impl Upload for FlawedUpload {
    fn put_part(&mut self, part: Payload) -> PartFuture {
        let number = self.calls;
        self.calls += 1;
        if self.storage.has(Flaw::KeepsParts) {
            self.storage.payloads.lock().unwrap().push(part.clone());
        }
        let (storage, key, sent) = (self.storage.clone(), self.key.clone(), Arc::clone(&self.sent));
        let copy = Payload::from(part.to_bytes().to_vec());
        if let Some(inner) = &mut self.inner
            && !storage.has(Flaw::UploadsAtOnce)
        {
            return inner.put_part(part);
        }
        drop(part);
        Box::pin(async move {
            let all: Payload = {
                let mut sent = sent.lock().unwrap();
                let in_order = !storage.has(Flaw::PartsInOrderOfTheirEnds);
                let at = if in_order { number } else { sent.len() };
                sent.insert(at, copy);
                sent.values().flat_map(|part| part.pieces().iter().cloned()).collect()
            };
            if storage.has(Flaw::UploadsAtOnce) {
                storage.inner.put(&key, all, PutMode::Overwrite).await?;
            }
            Ok(())
        })
    }

    async fn complete(mut self: Box<Self>) -> Result<ObjectMeta, StorageError> {
        let sent = self.sent();
        match self.inner.take() {
            Some(_) if self.storage.has(Flaw::UploadsAtOnce) => {
                self.storage.inner.put(&self.key, sent, PutMode::Overwrite).await
            }
            Some(inner) => Ok(self.storage.seen(inner.complete().await?)),
            None => {
                let replaces = self.storage.has(Flaw::UploadReplaces);
                let mode = if replaces { PutMode::Overwrite } else { PutMode::Create };
                self.storage.inner.put(&self.key, sent, mode).await
            }
        }
    }

    async fn abort(mut self: Box<Self>) -> Result<(), StorageError> {
        match self.inner.take() {
            Some(inner) => inner.abort().await,
            None => Ok(()),
        }
    }
}

impl Drop for FlawedUpload {
    fn drop(&mut self) {
        if self.storage.has(Flaw::DropCompletes)
            && let Some(inner) = self.inner.take()
        {
            let _ = futures_util::FutureExt::now_or_never(inner.complete());
        }
    }
}
