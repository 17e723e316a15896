//! Writes a folder of safetensors files.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{CheckpointError, Key, Payload, PlanError, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt as _, stream};
use indexmap::IndexMap;

use super::index_file::INDEX_NAME;
use super::layout::{HfFile, HfPlan, SINGLE_NAME};
use super::replaced::Old;
use super::sidecar_files::SidecarFiles;
use super::single::{Named, SingleFile};
use crate::safetensors::{
    RAW, RawTypes, SHARDING, SHARDING_VERSION, SHARDING_VERSION_WRITTEN, SafetensorsItem,
    ShardingInfo, encode_header, prepare,
};
use crate::upload::{ByteProgress, FileOptions};

/// Options of writing a folder.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HfWriteOptions {
    /// Whether an existing model is replaced or an error.
    pub overwrite: bool,
    /// Files to write concurrently. Each needs about 48 MiB of memory besides its data.
    pub parallelism: usize,
    /// Data segments in flight, of all these files together; each file has at least one.
    pub segments: usize,
    /// Further entries of every file's `__metadata__`. `format` is always `pt`, which transformers
    /// requires.
    pub metadata: IndexMap<String, String>,
    /// Files next to the weights, such as `config.json`. Existing ones with other contents are
    /// replaced together with the model.
    pub beside: Vec<(Key, Bytes)>,
}

impl Default for HfWriteOptions {
    /// No replacing, one file and one segment at a time, no further entries or files.
    fn default() -> Self {
        let (metadata, beside) = (IndexMap::new(), Vec::new());
        Self { overwrite: false, parallelism: 1, segments: 1, metadata, beside }
    }
}

/// The result of writing a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HfWritten {
    /// The files with their sizes in bytes, including the index.
    pub files: Vec<(Key, u64)>,
    /// The index, if there is one.
    pub index: Option<Key>,
    /// Removed files of the replaced model.
    pub removed: Vec<Key>,
    /// Files of the replaced model that could not be removed.
    pub left: Vec<Key>,
}

/// Writes the files of a plan, and the index last; parts of ranks get no index, as in PyTorch. A
/// single-file model gets its name `model.safetensors` last and replaces an existing one; loaders
/// prefer it to an index. Items of `data` are numbered as [`HfPlan::parts`].
///
/// Existing files stay unchanged until the new index is in place. A new file whose name is taken
/// gets a tag (`model-g1-00001-of-00002.safetensors`), which loaders find through the index. Then
/// the write removes an old index that was not replaced, the files that it named, files of
/// unfinished writes, and an old `model.safetensors`, which loaders would prefer.
///
/// Without a model to replace, [`HfWriteOptions::beside`] is written before the index. Otherwise a
/// changed `config.json` is removed before the index changes and the new one is written last, so
/// that weights are never paired with another model's configuration. Meanwhile the old one is in
/// [`CONFIG_ASIDE`](super::CONFIG_ASIDE).
///
/// # Errors
///
/// Without [`HfWriteOptions::overwrite`] when there is a model, before anything is written
/// ([`AlreadyExists`](StorageErrorKind::AlreadyExists)); when a header cannot be encoded; when the
/// data or the storage fails. Everything written is then removed, unless the new index is or may be
/// in place: then nothing that it names is removed.
pub async fn write_folder(
    storage: &Arc<dyn Storage>,
    plan: &HfPlan,
    data: Arc<dyn DataSource>,
    options: &HfWriteOptions,
    progress: Option<&ByteProgress>,
) -> Result<HfWritten, CheckpointError> {
    prepare_folder(storage, plan, data, options, progress).await?.publish().await
}

/// The first half of [`write_folder`]: writes files, which become a model with the second half,
/// [`PendingFolder::publish`].
///
/// # Errors
///
/// As [`write_folder`]. Everything written is then removed.
pub async fn prepare_folder<'a>(
    storage: &'a Arc<dyn Storage>,
    plan: &HfPlan,
    data: Arc<dyn DataSource>,
    options: &'a HfWriteOptions,
    progress: Option<&ByteProgress>,
) -> Result<PendingFolder<'a>, CheckpointError> {
    let old = Old::look(&**storage, plan).await?;
    old.refuse(plan, options)?;
    let replaces = (old.in_the_way(plan).is_some(), options.overwrite);
    let beside = SidecarFiles::look(&**storage, &options.beside, replaces).await?;
    let plan = old.free_names(plan)?;
    let job = Job { storage, plan: &plan, data: &data, options, stop: Arc::default() };
    let (files, single) = match plan.single() {
        Some(file) => (Vec::new(), Some(job.single(file, progress).await?)),
        None => match job.run(progress).await {
            (files, Ok(())) => (files, None),
            (files, Err(error)) => {
                remove(&**storage, files.iter().map(|(key, _)| key)).await;
                return Err(error);
            }
        },
    };
    Ok(PendingFolder { storage, overwrite: options.overwrite, old, beside, plan, files, single })
}

/// Complete files of a model that has no index yet.
#[must_use = "it is not a model until it is published"]
pub struct PendingFolder<'a> {
    storage: &'a Arc<dyn Storage>,
    overwrite: bool,
    old: Old,
    beside: SidecarFiles<'a>,
    plan: HfPlan,
    /// Files that have their names.
    files: Vec<Done>,
    /// A single-file model, which gets its name last.
    single: Option<SingleFile>,
}

impl fmt::Debug for PendingFolder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingFolder").field("files", &self.files).finish_non_exhaustive()
    }
}

impl PendingFolder<'_> {
    /// The second half of [`write_folder`]: publishes the model in place of the old one.
    ///
    /// # Errors
    ///
    /// As [`write_folder`].
    pub async fn publish(mut self) -> Result<HfWritten, CheckpointError> {
        let published = match self.single.take() {
            Some(single) => self.name(single).await,
            None => self.put_last().await,
        };
        let Self { storage, old, mut beside, files, .. } = self;
        let mut written = HfWritten { files, ..HfWritten::default() };
        match published {
            Published::Yes(last) => {
                let index = last.iter().map(|(key, _)| key).find(|key| key.as_str() == INDEX_NAME);
                written.index = index.cloned();
                written.files.extend(last);
            }
            Published::No(error) => {
                beside.undo().await;
                remove(&**storage, written.files.iter().map(|(key, _)| key)).await;
                return Err(error);
            }
            Published::Unsure(error) => return Err(error),
        }
        let new: BTreeSet<Key> = written.files.iter().map(|(key, _)| key.clone()).collect();
        let mut stale: Vec<&Key> = old.files.iter().filter(|key| !new.contains(*key)).collect();
        // An index is removed before the files that it names.
        stale.sort_by_key(|key| key.as_str() != INDEX_NAME);
        (written.removed, written.left) = remove(&**storage, stale.into_iter()).await;
        beside.finish().await?;
        Ok(written)
    }

    /// Removes the files.
    pub async fn abort(self) {
        if let Some(single) = self.single {
            single.abort().await;
        }
        remove(&**self.storage, self.files.iter().map(|(key, _)| key)).await;
    }

    /// Gives a single-file model its name.
    async fn name(&mut self, single: SingleFile) -> Published {
        if let Err(error) = self.beside.prepare().await {
            single.abort().await;
            return Published::No(error.into());
        }
        let done = single.done();
        match single.publish(&**self.storage).await {
            Named::New => Published::Yes(Some(done)),
            Named::Old(error) => Published::No(error.into()),
            Named::Unsure(error) => Published::Unsure(error.into()),
        }
    }

    /// Writes the index, and removes a single-file model, which loaders would prefer.
    async fn put_last(&mut self) -> Published {
        if let Err(error) = self.beside.prepare().await {
            return Published::No(error.into());
        }
        // Without a reference to the folder, whose upload other threads may not share.
        let json = self.plan.index_json().map(Bytes::from);
        let published = put_index(&**self.storage, json, self.overwrite).await;
        let single = self.old.files.iter().find(|key| key.as_str() == SINGLE_NAME);
        let (Published::Yes(index), Some(single)) = (&published, single) else { return published };
        let removed = self.storage.delete(std::slice::from_ref(single)).await;
        let Err(error) = removed else { return published };
        match self.storage.contains(single).await {
            Ok(false) => published,
            // Loaders prefer it, so the old model is still in place.
            Ok(true) => {
                remove(&**self.storage, index.iter().map(|(key, _)| key)).await;
                Published::No(error.into())
            }
            Err(_) => Published::Unsure(error.into()),
        }
    }
}

/// Writes the index, if there is one.
async fn put_index(storage: &dyn Storage, json: Option<Bytes>, overwrite: bool) -> Published {
    let Some(json) = json else { return Published::Yes(None) };
    let key = match Key::new(INDEX_NAME) {
        Ok(key) => key,
        Err(error) => return Published::No(StorageError::from(error).into()),
    };
    let put = |mode| storage.put(&key, Payload::from(json.clone()), mode);
    let mode = if overwrite { PutMode::Overwrite } else { PutMode::Create };
    let written = Published::Yes(Some((key.clone(), json.len() as u64)));
    let Err(error) = put(mode).await else { return written };
    match storage.read_all(&key).await {
        // The index exists; writing it again may make it durable.
        Ok(found) if found == json => match put(PutMode::Overwrite).await {
            Ok(_) => written,
            Err(_) => Published::Unsure(error.into()),
        },
        Ok(_) => Published::No(error.into()),
        Err(absent) if absent.kind() == StorageErrorKind::NotFound => Published::No(error.into()),
        Err(_) => Published::Unsure(error.into()),
    }
}

/// Fails when [`write_folder`] would refuse to replace an existing model.
///
/// # Errors
///
/// When there is a model, and when the storage fails.
pub async fn refuse_existing(
    storage: &Arc<dyn Storage>,
    plan: &HfPlan,
    options: &HfWriteOptions,
) -> Result<(), CheckpointError> {
    let old = Old::look(&**storage, plan).await?;
    old.refuse(plan, options)?;
    let replaces = (old.in_the_way(plan).is_some(), options.overwrite);
    SidecarFiles::look(&**storage, &options.beside, replaces).await?;
    Ok(())
}

/// The files that [`write_folder`] writes, with their sizes, under their names in an empty folder.
///
/// # Errors
///
/// When a header cannot be encoded.
pub fn file_byte_lens(
    plan: &HfPlan,
    options: &HfWriteOptions,
) -> Result<Vec<(Key, u64)>, CheckpointError> {
    let mut files = Vec::with_capacity(plan.files.len() + 1);
    for file in &plan.files {
        let (items, metadata) = contents(plan, file, options);
        files.push((file.name.clone(), encode_header(&items, &metadata)?.byte_len));
    }
    if let Some(json) = plan.index_json() {
        files.push((Key::new(INDEX_NAME).map_err(StorageError::from)?, json.len() as u64));
    }
    Ok(files)
}

/// The header of a file.
pub(super) fn contents(
    plan: &HfPlan,
    file: &HfFile,
    options: &HfWriteOptions,
) -> (Vec<SafetensorsItem>, IndexMap<String, String>) {
    let (mut raw, mut sharding) = (RawTypes::default(), ShardingInfo::default());
    let mut items = Vec::with_capacity(file.parts.len());
    for part in file.parts.iter().filter_map(|index| plan.parts.get(*index)) {
        let (dtype, shape) = raw.stored_as(&part.fqn, part.dtype, &part.shape);
        items.push(SafetensorsItem { name: Arc::clone(&part.fqn), dtype, shape });
        if let Some((offsets, _)) = &part.part {
            sharding.insert(Arc::clone(&part.fqn), offsets.clone());
        }
    }
    let mut metadata = options.metadata.clone();
    metadata.insert("format".to_owned(), "pt".to_owned());
    if !sharding.is_empty() {
        metadata.insert(SHARDING.to_owned(), sharding.to_json());
        metadata.insert(SHARDING_VERSION.to_owned(), SHARDING_VERSION_WRITTEN.to_owned());
    }
    if !raw.is_empty() {
        metadata.insert(RAW.to_owned(), raw.to_json());
    }
    (items, metadata)
}

/// The writing of one plan.
struct Job<'a> {
    storage: &'a Arc<dyn Storage>,
    plan: &'a HfPlan,
    data: &'a Arc<dyn DataSource>,
    options: &'a HfWriteOptions,
    /// Set when a file fails: the others then end instead of staying half-written, and none starts.
    stop: Arc<AtomicBool>,
}

/// A file and its size.
type Done = (Key, u64);

/// The result of publishing.
enum Published {
    /// The new model is published, by this file if it is a single one.
    Yes(Option<Done>),
    /// The old state remains.
    No(CheckpointError),
    /// Published but perhaps not durable; or the result is unknown.
    Unsure(CheckpointError),
}

impl Job<'_> {
    /// Returns the files that exist, and the first error.
    async fn run(
        &self,
        progress: Option<&ByteProgress>,
    ) -> (Vec<Done>, Result<(), CheckpointError>) {
        let writes: Vec<_> =
            self.plan.files.iter().map(|file| self.write_file(file, progress)).collect();
        let mut results = stream::iter(writes).buffered(self.options.parallelism.max(1));
        let (mut done, mut failed) = (Vec::new(), None);
        while let Some(result) = results.next().await {
            match result {
                Ok(file) => done.push(file),
                // A stopped file may end before the one that failed.
                Err(error) => match failed {
                    None | Some(CheckpointError::Canceled) => failed = Some(error),
                    Some(_) => {}
                },
            }
        }
        (done, failed.map_or(Ok(()), Err))
    }

    /// Uploads a single-file model without its name.
    async fn single(
        &self,
        file: &HfFile,
        progress: Option<&ByteProgress>,
    ) -> Result<SingleFile, CheckpointError> {
        let (items, metadata) = contents(self.plan, file, self.options);
        let mode = if self.options.overwrite { PutMode::Overwrite } else { PutMode::Create };
        let how = FileOptions::new(mode).with_in_flight(self.options.segments);
        let (storage, data) = (&**self.storage, self.data_of(file));
        SingleFile::send(storage, (&file.name, how), &items, &metadata, data, progress).await
    }

    fn data_of(&self, file: &HfFile) -> Arc<dyn DataSource> {
        let (data, stop) = (Arc::clone(self.data), Arc::clone(&self.stop));
        Arc::new(OneFile { data, parts: file.parts.clone(), stop })
    }

    async fn write_file(
        &self,
        file: &HfFile,
        progress: Option<&ByteProgress>,
    ) -> Result<Done, CheckpointError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(CheckpointError::Canceled);
        }
        let (items, metadata) = contents(self.plan, file, self.options);
        let data = self.data_of(file);
        let files = self.options.parallelism.min(self.plan.files.len()).max(1);
        let how = FileOptions::new(PutMode::Create).with_in_flight(self.options.segments / files);
        let written = async {
            let name = (&file.name, how);
            let pending = prepare(&**self.storage, name, &items, &metadata, data, progress).await?;
            let byte_len = pending.byte_len();
            pending.publish().await?;
            Ok(byte_len)
        };
        let written: Result<u64, CheckpointError> = written.await;
        let byte_len = written.inspect_err(|_| self.stop.store(true, Ordering::Relaxed))?;
        Ok((file.name.clone(), byte_len))
    }
}

/// The items of one file within those of all.
#[derive(Debug)]
pub(super) struct OneFile {
    pub(super) data: Arc<dyn DataSource>,
    pub(super) parts: Vec<usize>,
    pub(super) stop: Arc<AtomicBool>,
}

#[async_trait]
impl DataSource for OneFile {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(CheckpointError::Canceled);
        }
        let part = self
            .parts
            .get(item)
            .copied()
            .ok_or(PlanError::NoItem { item: item as u64, items: self.parts.len() as u64 })?;
        self.data.resolve(part, byte_range).await
    }

    fn segment_bytes(&self) -> u64 {
        self.data.segment_bytes()
    }
}

/// Removes files. Returns those removed and those not.
async fn remove<'a>(
    storage: &dyn Storage,
    keys: impl Iterator<Item = &'a Key>,
) -> (Vec<Key>, Vec<Key>) {
    let keys = keys.cloned().collect::<Vec<_>>();
    if storage.delete(&keys).await.is_ok() {
        return (keys, Vec::new());
    }
    let (mut removed, mut left) = (Vec::new(), Vec::new());
    for key in keys {
        match storage.delete(std::slice::from_ref(&key)).await {
            Ok(()) => removed.push(key),
            Err(error) => {
                tracing::warn!(file = %key, %error, "cannot remove a file");
                left.push(key);
            }
        }
    }
    (removed, left)
}
