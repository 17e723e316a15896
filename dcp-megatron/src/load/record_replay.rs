//! One rank's reads on opening, replayed on all others: a storage that records reads, and one that
//! replays the recording.
//!
//! Whatever opens a checkpoint asks for the same on every rank, so this serves every format, and
//! the strategies of plug-ins. What others were told is only believed where a rank's own look at
//! the files says that they are the same; otherwise it reads what it sees, and the load finds out
//! that ranks see different checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::error::{Phase, StorageOp};
use dcp_core::storage::{
    Capabilities, Claim, FolderEntry, FolderStream, ObjectMeta, ObjectStream, PutMode, ReadInto,
    ReadOutcome, ReadRequest, Upload, UploadOptions, Version, WholeObject,
};
use dcp_core::{
    CheckpointMetadata, Key, Payload, PlanError, Storage, StorageError, StorageErrorKind,
};
use dcp_engine::Group;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use serde::{Deserialize, Serialize};

use crate::agreement;
use crate::error::MegatronError;
use crate::open::checkpoint::MegatronOpenOptions;
use crate::open::strategy::{Opened, Strategies};

/// Of more bytes than this no notes are taken: other ranks read them themselves.
const BYTES_MAX: u64 = 1 << 30;
/// Of longer listings neither.
const LISTED_MAX: usize = 1 << 20;

/// A checkpoint that was opened, and its index.
pub(crate) type Indexed = (Opened, Arc<CheckpointMetadata>);

/// Opens a checkpoint on all ranks of a group, of which rank 0 reads it.
///
/// The outer error is the same on all ranks, such as that rank 0 could not open it; the inner one
/// is this rank's own.
pub(crate) async fn open(
    strategies: &Strategies,
    storage: &Arc<dyn Storage>,
    options: &MegatronOpenOptions,
    group: &Group,
) -> Result<Result<Indexed, MegatronError>, MegatronError> {
    let indexed = async |storage: &Arc<dyn Storage>| {
        let opened = strategies.open(storage, options).await?;
        let metadata = opened.reader.metadata().await?;
        Ok::<_, MegatronError>((opened, metadata))
    };
    let context = group.context();
    if context.world_size == 1 {
        return Ok(indexed(storage).await);
    }
    if context.rank != 0 {
        let notes = Notes::from_wire(&group.broadcast(Phase::Open, 0, None).await?);
        let notes = match notes {
            Ok(notes) => notes,
            Err(error) => return Ok(Err(error.into())),
        };
        if !notes.hold(&**storage).await {
            return Ok(indexed(storage).await);
        }
        let told = Told::new(storage, Mode::Tell(Arc::new(notes)));
        let opened = indexed(&(Arc::clone(&told) as _)).await;
        told.finish();
        return Ok(opened);
    }
    let told = Told::new(storage, Mode::Note(Notes::default()));
    let opened = indexed(&(Arc::clone(&told) as _)).await;
    let (notes, opened) = match opened {
        Ok(opened) => (told.finish().to_wire().map_err(Into::into), Some(opened)),
        Err(error) => (Err(agreement::told(group, Phase::Open, error)), None),
    };
    group.broadcast(Phase::Open, 0, Some(notes)).await?;
    Ok(opened.ok_or_else(|| group.unanswered().into()))
}

/// A request to a storage, and its result.
#[derive(Debug, Default)]
struct Notes {
    /// `None` where there is no such object.
    stats: BTreeMap<Key, Option<ObjectMeta>>,
    /// Parts of objects: where each begins, and its bytes.
    ranges: BTreeMap<Key, BTreeMap<u64, Bytes>>,
    lists: BTreeMap<Option<Key>, Vec<ObjectMeta>>,
    folders: BTreeMap<Option<Key>, Vec<FolderEntry>>,
    byte_len: u64,
}

/// An object on the wire: its name, length, age and version.
type Object = (String, u64, Option<Duration>, Option<String>);

#[derive(Debug, Serialize, Deserialize)]
struct Wire {
    stats: Vec<Object>,
    absent: Vec<String>,
    /// Name, where it begins and how long it is; the bytes follow.
    ranges: Vec<(String, u64, u64)>,
    lists: Vec<(Option<String>, Vec<Object>)>,
    /// The objects and the folders of a folder.
    folders: Vec<(Option<String>, Vec<Object>, Vec<String>)>,
}

impl Notes {
    /// Whether the files that were read are what this rank sees, too, as far as length, age and
    /// version tell.
    async fn hold(&self, storage: &dyn Storage) -> bool {
        let listed = self.listed();
        let same = |key: &Key| {
            let noted = self.stats.get(key).and_then(Option::as_ref);
            let noted = noted.or_else(|| listed.get(key).copied()).cloned();
            let key = key.clone();
            async move {
                let Some(noted) = noted else { return false };
                storage.stat(&key).await.is_ok_and(|seen| is_same(&noted, &seen))
            }
        };
        let parallelism = storage.capabilities().parallelism.max(1);
        let mut checks = stream::iter(self.ranges.keys().map(same)).buffered(parallelism.into());
        while let Some(same) = checks.next().await {
            if !same {
                return false;
            }
        }
        true
    }

    /// The objects of noted listings.
    fn listed(&self) -> HashMap<&Key, &ObjectMeta> {
        let in_folders = self.folders.values().flatten().filter_map(|entry| match entry {
            FolderEntry::Object(meta) => Some(meta),
            _ => None,
        });
        let all = self.lists.values().flatten().chain(in_folders);
        all.map(|meta| (&meta.key, meta)).collect()
    }

    /// The bytes of an object that were noted.
    fn bytes(&self, key: &Key, offset: u64, len: usize) -> Option<&[u8]> {
        let (start, bytes) = self.ranges.get(key)?.range(..=offset).next_back()?;
        let from = usize::try_from(offset.checked_sub(*start)?).ok()?;
        bytes.get(from..from.checked_add(len)?)
    }

    fn note(&mut self, key: &Key, offset: u64, bytes: &[u8]) {
        let byte_len = self.byte_len.saturating_add(bytes.len() as u64);
        if byte_len <= BYTES_MAX && self.bytes(key, offset, bytes.len()).is_none() {
            self.byte_len = byte_len;
            let bytes = Bytes::copy_from_slice(bytes);
            self.ranges.entry(key.clone()).or_default().insert(offset, bytes);
        }
    }

    fn to_wire(&self) -> Result<Bytes, PlanError> {
        let (mut stats, mut absent, mut ranges) = (Vec::new(), Vec::new(), Vec::new());
        for (key, meta) in &self.stats {
            match meta {
                Some(meta) => stats.push(object(meta)),
                None => absent.push(key.to_string()),
            }
        }
        let parts = || {
            let parts = self.ranges.iter();
            parts.flat_map(|(key, parts)| parts.iter().map(move |(at, bytes)| (key, *at, bytes)))
        };
        for (key, at, bytes) in parts() {
            ranges.push((key.to_string(), at, bytes.len() as u64));
        }
        let lists = self.lists.iter().map(|(prefix, listed)| {
            (prefix.as_ref().map(ToString::to_string), listed.iter().map(object).collect())
        });
        let folders = self.folders.iter().map(|(folder, listed)| {
            let (mut objects, mut folders) = (Vec::new(), Vec::new());
            for entry in listed {
                match entry {
                    FolderEntry::Object(meta) => objects.push(object(meta)),
                    FolderEntry::Folder(folder) => folders.push(folder.to_string()),
                    _ => {}
                }
            }
            (folder.as_ref().map(ToString::to_string), objects, folders)
        });
        let folders = folders.collect();
        let wire = Wire { stats, absent, ranges, lists: lists.collect(), folders };
        let head = serde_json::to_vec(&wire).map_err(|error| bad(&error))?;
        let mut message = Vec::new();
        message.extend_from_slice(&(head.len() as u64).to_le_bytes());
        message.extend_from_slice(&head);
        parts().for_each(|(.., bytes)| message.extend_from_slice(bytes));
        Ok(message.into())
    }

    fn from_wire(message: &Bytes) -> Result<Self, PlanError> {
        let short = || bad(&"it ends too early");
        let (len, rest) = message.split_first_chunk::<8>().ok_or_else(short)?;
        let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| short())?;
        let (head, data) = rest.split_at_checked(len).ok_or_else(short)?;
        let Wire { stats, absent, ranges, lists, folders } =
            serde_json::from_slice(head).map_err(|error| bad(&error))?;
        let mut notes = Self::default();
        for meta in stats {
            let meta = seen(meta)?;
            notes.stats.insert(meta.key.clone(), Some(meta));
        }
        for name in absent {
            notes.stats.insert(key(name)?, None);
        }
        let mut data = message.slice_ref(data);
        for (name, at, len) in ranges {
            let len = usize::try_from(len).ok().filter(|len| *len <= data.len());
            let bytes = data.split_to(len.ok_or_else(short)?);
            notes.ranges.entry(key(name)?).or_default().insert(at, bytes);
        }
        for (prefix, listed) in lists {
            let listed = listed.into_iter().map(seen).collect::<Result<_, _>>()?;
            notes.lists.insert(prefix.map(key).transpose()?, listed);
        }
        for (folder, objects, folders) in folders {
            let objects = objects.into_iter().map(|one| Ok(FolderEntry::Object(seen(one)?)));
            let folders = folders.into_iter().map(|one| Ok(FolderEntry::Folder(key(one)?)));
            let listed = objects.chain(folders).collect::<Result<_, PlanError>>()?;
            notes.folders.insert(folder.map(key).transpose()?, listed);
        }
        Ok(notes)
    }
}

/// Whether two descriptions are of one object. Ages in listings of a store have milliseconds, those
/// in its other answers whole seconds.
fn is_same(noted: &ObjectMeta, seen: &ObjectMeta) -> bool {
    let age = |meta: &ObjectMeta| meta.modified?.duration_since(SystemTime::UNIX_EPOCH).ok();
    let same_age = match (age(noted), age(seen)) {
        (Some(a), Some(b)) => {
            let is_rounded = a.subsec_nanos() == 0 || b.subsec_nanos() == 0;
            a == b || (is_rounded && a.as_secs() == b.as_secs())
        }
        _ => false,
    };
    same_age && noted.byte_len == seen.byte_len && noted.version == seen.version
}

fn object(meta: &ObjectMeta) -> Object {
    let age = meta.modified.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    let version = meta.version.as_ref().map(|version| version.as_str().to_owned());
    (meta.key.to_string(), meta.byte_len, age, version)
}

fn seen((name, byte_len, age, version): Object) -> Result<ObjectMeta, PlanError> {
    let modified = age.and_then(|age| SystemTime::UNIX_EPOCH.checked_add(age));
    let version = version.map(Version::new);
    Ok(ObjectMeta::new(key(name)?, byte_len).with_modified(modified).with_version(version))
}

fn key(name: String) -> Result<Key, PlanError> {
    Key::new(name).map_err(|error| bad(&error))
}

fn bad(problem: &dyn std::fmt::Display) -> PlanError {
    PlanError::Wire { problem: format!("what rank 0 read of the checkpoint: {problem}") }
}

/// A storage that notes or tells until [`finish`](Self::finish), and then is the one beneath.
#[derive(Debug)]
struct Told {
    inner: Arc<dyn Storage>,
    mode: Arc<Mutex<Mode>>,
}

#[derive(Debug, Default)]
enum Mode {
    Note(Notes),
    Tell(Arc<Notes>),
    #[default]
    Off,
}

impl Told {
    fn new(storage: &Arc<dyn Storage>, mode: Mode) -> Arc<Self> {
        Arc::new(Self { inner: Arc::clone(storage), mode: Arc::new(Mutex::new(mode)) })
    }

    /// Ends the notes, which are returned where they were taken.
    fn finish(&self) -> Notes {
        match std::mem::take(&mut *lock(&self.mode)) {
            Mode::Note(notes) => notes,
            _ => Notes::default(),
        }
    }

    fn told(&self) -> Option<Arc<Notes>> {
        match &*lock(&self.mode) {
            Mode::Tell(notes) => Some(Arc::clone(notes)),
            _ => None,
        }
    }

    fn note(&self, note: impl FnOnce(&mut Notes)) {
        if let Mode::Note(notes) = &mut *lock(&self.mode) {
            note(notes);
        }
    }
}

type Listed<T> = Pin<Box<dyn Stream<Item = Result<T, StorageError>> + Send>>;

impl Told {
    /// The same listing, noted when it was followed to its end.
    fn noting<T: Clone + Send + 'static>(
        &self,
        listing: Listed<T>,
        note: impl FnOnce(&mut Notes, Vec<T>) + Send + 'static,
    ) -> Listed<T> {
        if !matches!(&*lock(&self.mode), Mode::Note(_)) {
            return listing;
        }
        let start = (listing, Some(Vec::new()), note, Arc::clone(&self.mode));
        Box::pin(stream::try_unfold(start, |(mut listing, mut listed, note, mode)| async move {
            if let Some(entry) = listing.try_next().await? {
                listed = listed.filter(|listed: &Vec<_>| listed.len() < LISTED_MAX);
                listed.iter_mut().for_each(|listed| listed.push(entry.clone()));
                return Ok(Some((entry, (listing, listed, note, mode))));
            }
            if let (Mode::Note(notes), Some(listed)) = (&mut *lock(&mode), listed) {
                note(notes, listed);
            }
            Ok(None)
        }))
    }
}

fn absent(op: StorageOp, key: &Key) -> StorageError {
    StorageError::new(StorageErrorKind::NotFound, op, Some(key.clone()))
}

fn lock(mode: &Mutex<Mode>) -> MutexGuard<'_, Mode> {
    mode.lock().unwrap_or_else(PoisonError::into_inner)
}

#[async_trait]
impl Storage for Told {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        if let Some(notes) = self.told()
            && let Some(noted) = notes.stats.get(key)
        {
            return noted.clone().ok_or_else(|| absent(StorageOp::Stat, key));
        }
        let found = self.inner.stat(key).await;
        let noted = match &found {
            Ok(meta) => Some(Some(meta.clone())),
            Err(error) if error.kind() == StorageErrorKind::NotFound => Some(None),
            Err(_) => None,
        };
        if let Some(noted) = noted {
            self.note(|notes| {
                notes.stats.insert(key.clone(), noted);
            });
        }
        found
    }

    async fn read(&self, key: &Key, mut request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        if let Some(notes) = self.told() {
            let fill = |read: &mut ReadInto| {
                let bytes = notes.bytes(key, read.byte_offset, read.buffer.len());
                bytes.map(|bytes| read.buffer.copy_from_slice(bytes)).is_some()
            };
            if request.ranges.iter_mut().all(fill) {
                let buffers = request.ranges.into_iter().map(|read| read.buffer).collect();
                return Ok(ReadOutcome::new(buffers));
            }
        }
        let offsets: Vec<u64> = request.ranges.iter().map(|read| read.byte_offset).collect();
        let outcome = self.inner.read(key, request).await?;
        self.note(|notes| {
            let read = offsets.iter().zip(&outcome.buffers);
            read.for_each(|(at, bytes)| notes.note(key, *at, bytes));
        });
        Ok(outcome)
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        if let Some(notes) = self.told()
            && let Some(noted) = notes.stats.get(key)
        {
            let Some(meta) = noted.clone() else { return Err(absent(StorageOp::Read, key)) };
            let len = usize::try_from(meta.byte_len).ok().filter(|_| meta.byte_len <= max_bytes);
            if let Some(bytes) = len.and_then(|len| notes.bytes(key, 0, len)) {
                let bytes = Bytes::copy_from_slice(bytes);
                return Ok(WholeObject::new(meta, bytes));
            }
        }
        let found = self.inner.read_whole(key, max_bytes).await;
        match &found {
            Ok(whole) => self.note(|notes| {
                notes.stats.insert(key.clone(), Some(whole.meta.clone()));
                notes.note(key, 0, &whole.bytes);
            }),
            Err(error) if error.kind() == StorageErrorKind::NotFound => self.note(|notes| {
                notes.stats.insert(key.clone(), None);
            }),
            Err(_) => {}
        }
        found
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        self.inner.put(key, payload, mode).await
    }

    async fn start_upload(
        &self,
        key: &Key,
        options: UploadOptions,
    ) -> Result<Box<dyn Upload>, StorageError> {
        self.inner.start_upload(key, options).await
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let folder = folder.cloned();
        if let Some(listed) = self.told().and_then(|notes| notes.folders.get(&folder).cloned()) {
            return Box::pin(stream::iter(listed.into_iter().map(Ok)));
        }
        let listing = self.inner.list_folder(folder.as_ref());
        self.noting(listing, |notes, listed| drop(notes.folders.insert(folder, listed)))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let folder = folder.cloned();
        if let Some(listed) = self.told().and_then(|notes| notes.lists.get(&folder).cloned()) {
            return Box::pin(stream::iter(listed.into_iter().map(Ok)));
        }
        let listing = self.inner.list(folder.as_ref());
        self.noting(listing, |notes, listed| drop(notes.lists.insert(folder, listed)))
    }

    async fn delete(&self, keys: &[Key]) -> Result<(), StorageError> {
        self.inner.delete(keys).await
    }

    async fn remove_leftovers(
        &self,
        folder: Option<&Key>,
        min_age: Duration,
    ) -> Result<u64, StorageError> {
        self.inner.remove_leftovers(folder, min_age).await
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        self.inner.claim(key).await
    }
}
