//! One rank's reads on opening, replayed on all others: a storage that records reads, and one that
//! replays the recording.
//!
//! Opening a checkpoint makes the same requests on every rank, so this serves every format, and the
//! strategies of plug-ins. A rank replays a recording only if the length, age and version of each
//! recorded file are the same in its own storage. Otherwise it reads the files itself, and the load
//! reports that ranks see different checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::error::{Phase, StorageOp};
use dcp_core::storage::{
    FolderEntry, FolderStream, ObjectMeta, ObjectStream, ReadInto, ReadOutcome, ReadRequest,
    Version, WholeObject,
};
use dcp_core::{CheckpointMetadata, Key, PlanError, Storage, StorageError, StorageErrorKind};
use dcp_engine::Group;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use serde::{Deserialize, Serialize};

use crate::agreement;
use crate::error::MegatronError;
use crate::open::checkpoint::MegatronOpenOptions;
use crate::open::strategy::{Opened, Strategies};

/// The maximum bytes of a recording. Other ranks read what is beyond it themselves.
const BYTES_MAX: u64 = 1 << 30;
/// The maximum entries of a recorded listing.
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
        let recording = Recording::from_wire(&group.broadcast(Phase::Open, 0, None).await?);
        let recording = match recording {
            Ok(recording) => recording,
            Err(error) => return Ok(Err(error.into())),
        };
        if !recording.hold(&**storage).await {
            return Ok(indexed(storage).await);
        }
        let recorded = RecordedStorage::new(storage, Mode::Replay(Arc::new(recording)));
        let opened = indexed(&(Arc::clone(&recorded) as _)).await;
        recorded.finish();
        return Ok(opened);
    }
    let recorded = RecordedStorage::new(storage, Mode::Record(Recording::default()));
    let opened = indexed(&(Arc::clone(&recorded) as _)).await;
    let (recording, opened) = match opened {
        Ok(opened) => (recorded.finish().to_wire().map_err(Into::into), Some(opened)),
        Err(error) => (Err(agreement::reported(group, Phase::Open, error)), None),
    };
    group.broadcast(Phase::Open, 0, Some(recording)).await?;
    Ok(opened.ok_or_else(|| group.unanswered().into()))
}

/// Requests to a storage, and their results.
#[derive(Debug, Default)]
struct Recording {
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

impl Recording {
    /// Whether the recorded files have the same length, age and version in this rank's storage.
    async fn hold(&self, storage: &dyn Storage) -> bool {
        let listed = self.listed();
        let same = |key: &Key| {
            let recorded = self.stats.get(key).and_then(Option::as_ref);
            let recorded = recorded.or_else(|| listed.get(key).copied()).cloned();
            let key = key.clone();
            async move {
                let Some(recorded) = recorded else { return false };
                storage.stat(&key).await.is_ok_and(|seen| is_same(&recorded, &seen))
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

    /// The objects of recorded listings.
    fn listed(&self) -> HashMap<&Key, &ObjectMeta> {
        let in_folders = self.folders.values().flatten().filter_map(|entry| match entry {
            FolderEntry::Object(meta) => Some(meta),
            _ => None,
        });
        let all = self.lists.values().flatten().chain(in_folders);
        all.map(|meta| (&meta.key, meta)).collect()
    }

    /// The bytes of an object that were recorded.
    fn bytes(&self, key: &Key, offset: u64, len: usize) -> Option<&[u8]> {
        let (start, bytes) = self.ranges.get(key)?.range(..=offset).next_back()?;
        let from = usize::try_from(offset.checked_sub(*start)?).ok()?;
        bytes.get(from..from.checked_add(len)?)
    }

    fn record(&mut self, key: &Key, offset: u64, bytes: &[u8]) {
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
        let mut recording = Self::default();
        for meta in stats {
            let meta = seen(meta)?;
            recording.stats.insert(meta.key.clone(), Some(meta));
        }
        for name in absent {
            recording.stats.insert(key(name)?, None);
        }
        let mut data = message.slice_ref(data);
        for (name, at, len) in ranges {
            let len = usize::try_from(len).ok().filter(|len| *len <= data.len());
            let bytes = data.split_to(len.ok_or_else(short)?);
            recording.ranges.entry(key(name)?).or_default().insert(at, bytes);
        }
        for (prefix, listed) in lists {
            let listed = listed.into_iter().map(seen).collect::<Result<_, _>>()?;
            recording.lists.insert(prefix.map(key).transpose()?, listed);
        }
        for (folder, objects, folders) in folders {
            let objects = objects.into_iter().map(|one| Ok(FolderEntry::Object(seen(one)?)));
            let folders = folders.into_iter().map(|one| Ok(FolderEntry::Folder(key(one)?)));
            let listed = objects.chain(folders).collect::<Result<_, PlanError>>()?;
            recording.folders.insert(folder.map(key).transpose()?, listed);
        }
        Ok(recording)
    }
}

/// Whether two descriptions are of one object. Ages in listings of a store have milliseconds, those
/// in its other answers whole seconds.
fn is_same(recorded: &ObjectMeta, seen: &ObjectMeta) -> bool {
    let age = |meta: &ObjectMeta| meta.modified?.duration_since(SystemTime::UNIX_EPOCH).ok();
    let same_age = match (age(recorded), age(seen)) {
        (Some(a), Some(b)) => {
            let is_rounded = a.subsec_nanos() == 0 || b.subsec_nanos() == 0;
            a == b || (is_rounded && a.as_secs() == b.as_secs())
        }
        _ => false,
    };
    same_age && recorded.byte_len == seen.byte_len && recorded.version == seen.version
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
    PlanError::message("what rank 0 read of the checkpoint", problem.to_string())
}

/// A storage that records or replays until [`finish`](Self::finish), and then forwards to `inner`.
#[derive(Debug)]
struct RecordedStorage {
    inner: Arc<dyn Storage>,
    mode: Arc<Mutex<Mode>>,
}

#[derive(Debug, Default)]
enum Mode {
    Record(Recording),
    Replay(Arc<Recording>),
    #[default]
    Off,
}

impl RecordedStorage {
    fn new(storage: &Arc<dyn Storage>, mode: Mode) -> Arc<Self> {
        Arc::new(Self { inner: Arc::clone(storage), mode: Arc::new(Mutex::new(mode)) })
    }

    /// Ends recording or replaying. Returns the recording, if there is one.
    fn finish(&self) -> Recording {
        match std::mem::take(&mut *lock(&self.mode)) {
            Mode::Record(recording) => recording,
            _ => Recording::default(),
        }
    }

    fn replayed(&self) -> Option<Arc<Recording>> {
        match &*lock(&self.mode) {
            Mode::Replay(recording) => Some(Arc::clone(recording)),
            _ => None,
        }
    }

    fn record(&self, record: impl FnOnce(&mut Recording)) {
        if let Mode::Record(recording) = &mut *lock(&self.mode) {
            record(recording);
        }
    }
}

type Listed<T> = Pin<Box<dyn Stream<Item = Result<T, StorageError>> + Send>>;

impl RecordedStorage {
    /// Passes `listing` on, and records its entries once it was followed to its end.
    fn recording<T: Clone + Send + 'static>(
        &self,
        listing: Listed<T>,
        record: impl FnOnce(&mut Recording, Vec<T>) + Send + 'static,
    ) -> Listed<T> {
        if !matches!(&*lock(&self.mode), Mode::Record(_)) {
            return listing;
        }
        let start = (listing, Some(Vec::new()), record, Arc::clone(&self.mode));
        Box::pin(stream::try_unfold(start, |(mut listing, mut listed, record, mode)| async move {
            if let Some(entry) = listing.try_next().await? {
                listed = listed.filter(|listed: &Vec<_>| listed.len() < LISTED_MAX);
                listed.iter_mut().for_each(|listed| listed.push(entry.clone()));
                return Ok(Some((entry, (listing, listed, record, mode))));
            }
            if let (Mode::Record(recording), Some(listed)) = (&mut *lock(&mode), listed) {
                record(recording, listed);
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
impl Storage for RecordedStorage {
    dcp_core::forward_storage!(
        inner: capabilities, put, start_upload, delete, leftovers, remove_empty_folders, claim
    );

    async fn stat(&self, key: &Key) -> Result<ObjectMeta, StorageError> {
        if let Some(recording) = self.replayed()
            && let Some(recorded) = recording.stats.get(key)
        {
            return recorded.clone().ok_or_else(|| absent(StorageOp::Stat, key));
        }
        let found = self.inner.stat(key).await;
        let recorded = match &found {
            Ok(meta) => Some(Some(meta.clone())),
            Err(error) if error.kind() == StorageErrorKind::NotFound => Some(None),
            Err(_) => None,
        };
        if let Some(recorded) = recorded {
            self.record(|recording| {
                recording.stats.insert(key.clone(), recorded);
            });
        }
        found
    }

    async fn read(&self, key: &Key, mut request: ReadRequest) -> Result<ReadOutcome, StorageError> {
        if let Some(recording) = self.replayed() {
            let fill = |read: &mut ReadInto| {
                let bytes = recording.bytes(key, read.byte_offset, read.buffer.len());
                bytes.map(|bytes| read.buffer.copy_from_slice(bytes)).is_some()
            };
            if request.ranges.iter_mut().all(fill) {
                let buffers = request.ranges.into_iter().map(|read| read.buffer).collect();
                return Ok(ReadOutcome::new(buffers));
            }
        }
        let offsets: Vec<u64> = request.ranges.iter().map(|read| read.byte_offset).collect();
        let outcome = self.inner.read(key, request).await?;
        self.record(|recording| {
            let read = offsets.iter().zip(&outcome.buffers);
            read.for_each(|(at, bytes)| recording.record(key, *at, bytes));
        });
        Ok(outcome)
    }

    async fn read_whole(&self, key: &Key, max_bytes: u64) -> Result<WholeObject, StorageError> {
        if let Some(recording) = self.replayed()
            && let Some(recorded) = recording.stats.get(key)
        {
            let Some(meta) = recorded.clone() else { return Err(absent(StorageOp::Read, key)) };
            let len = usize::try_from(meta.byte_len).ok().filter(|_| meta.byte_len <= max_bytes);
            if let Some(bytes) = len.and_then(|len| recording.bytes(key, 0, len)) {
                let bytes = Bytes::copy_from_slice(bytes);
                return Ok(WholeObject::new(meta, bytes));
            }
        }
        let found = self.inner.read_whole(key, max_bytes).await;
        match &found {
            Ok(whole) => self.record(|recording| {
                recording.stats.insert(key.clone(), Some(whole.meta.clone()));
                recording.record(key, 0, &whole.bytes);
            }),
            Err(error) if error.kind() == StorageErrorKind::NotFound => self.record(|recording| {
                recording.stats.insert(key.clone(), None);
            }),
            Err(_) => {}
        }
        found
    }

    fn list_folder(&self, folder: Option<&Key>) -> FolderStream {
        let folder = folder.cloned();
        if let Some(listed) =
            self.replayed().and_then(|recording| recording.folders.get(&folder).cloned())
        {
            return Box::pin(stream::iter(listed.into_iter().map(Ok)));
        }
        let listing = self.inner.list_folder(folder.as_ref());
        self.recording(listing, |recording, listed| drop(recording.folders.insert(folder, listed)))
    }

    fn list(&self, folder: Option<&Key>) -> ObjectStream {
        let folder = folder.cloned();
        if let Some(listed) =
            self.replayed().and_then(|recording| recording.lists.get(&folder).cloned())
        {
            return Box::pin(stream::iter(listed.into_iter().map(Ok)));
        }
        let listing = self.inner.list(folder.as_ref());
        self.recording(listing, |recording, listed| drop(recording.lists.insert(folder, listed)))
    }
}
