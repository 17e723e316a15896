//! Writing a folder of safetensors files.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::{
    CheckpointError, DataSource, Key, Payload, PlanError, PutMode, Storage, StorageError,
    StorageErrorKind, StorageExt as _,
};
use futures_util::{StreamExt as _, stream};
use indexmap::IndexMap;

use super::index_file::INDEX_NAME;
use super::layout::{HfFile, HfPlan, SINGLE_NAME};
use super::replaced::Old;
use super::sidecar_files::SidecarFiles;
use super::single::{Named, SingleFile};
use crate::safetensors::{
    RAW, RawTypes, SHARDING, SHARDING_VERSION, SHARDING_VERSION_WRITTEN, SafetensorsItem,
    ShardingInfo, encode_header, write,
};
use crate::upload::{FileOptions, Progress};

/// How a folder is written.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HfWriteOptions {
    /// Whether a model that is there is replaced; otherwise it is an error.
    pub overwrite: bool,
    /// Files to write at once; of a model in one file, segments to read at once. Each file takes about 48 MiB besides what `data` takes.
    pub parallelism: usize,
    /// More entries for the `__metadata__` of every file. `format` is always `pt`, which
    /// transformers asks for.
    pub metadata: IndexMap<String, String>,
    /// Files beside the weights, such as `config.json`. Those that are there with other contents are
    /// replaced with the model.
    pub beside: Vec<(Key, Bytes)>,
}

impl Default for HfWriteOptions {
    /// Nothing is replaced, one file at a time, no more entries, no other files.
    fn default() -> Self {
        Self { overwrite: false, parallelism: 1, metadata: IndexMap::new(), beside: Vec::new() }
    }
}

/// What was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HfWritten {
    /// Each file and its bytes, the index included.
    pub files: Vec<(Key, u64)>,
    /// The index, where there is one.
    pub index: Option<Key>,
    /// Files of the replaced model that are gone.
    pub removed: Vec<Key>,
    /// Files of the replaced model that could not be removed.
    pub left: Vec<Key>,
}

/// Writes the files of a plan and then, as the last thing, the index; where ranks' parts are
/// written there is no index, as in PyTorch. A model in one file is `model.safetensors`, which gets
/// its name as the last thing and replaces one that is there; loaders prefer it to an index.
/// `data` counts items as [`HfPlan::parts`].
///
/// What is there is not touched before the index of the new files is in place: a name that is
/// taken is given a tag (`model-g1-00001-of-00002.safetensors`), which loaders that go by the
/// index follow. Then an old index that is not replaced is removed, the files that it named, those
/// that an unfinished write left, and an old `model.safetensors`, which loaders would prefer.
///
/// [`HfWriteOptions::beside`] comes before the index where no model is replaced. Where one is,
/// `config.json` goes before the index changes, unless it stays as it is, and the new one comes
/// last: no moment shows weights of one model with the configuration of another. Until then the
/// old one is in [`CONFIG_ASIDE`](super::CONFIG_ASIDE).
///
/// # Errors
///
/// Without [`HfWriteOptions::overwrite`] when there is a model, before anything is written
/// ([`AlreadyExists`](StorageErrorKind::AlreadyExists)); when a header cannot be made; when data
/// or storage fail. Then all that was written is removed, unless the new index is in place, or it
/// cannot be told whether it is: nothing is removed then that it names.
pub async fn write_folder(
    storage: &Arc<dyn Storage>,
    plan: &HfPlan,
    data: Arc<dyn DataSource>,
    options: &HfWriteOptions,
    progress: Option<&Progress>,
) -> Result<HfWritten, CheckpointError> {
    prepare_folder(storage, plan, data, options, progress).await?.publish().await
}

/// The first half of [`write_folder`]: writes the files, which are no model until the second half,
/// [`PendingFolder::publish`].
///
/// # Errors
///
/// As [`write_folder`]; then all that was written is removed.
pub async fn prepare_folder<'a>(
    storage: &'a Arc<dyn Storage>,
    plan: &HfPlan,
    data: Arc<dyn DataSource>,
    options: &'a HfWriteOptions,
    progress: Option<&Progress>,
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

/// Files of a model that are written, and are no model yet.
#[must_use = "it is no model until it is published"]
pub struct PendingFolder<'a> {
    storage: &'a Arc<dyn Storage>,
    overwrite: bool,
    old: Old,
    beside: SidecarFiles<'a>,
    plan: HfPlan,
    /// Those that have their names.
    files: Vec<Done>,
    /// A model in one file, which gets its name last.
    single: Option<SingleFile>,
}

impl fmt::Debug for PendingFolder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingFolder").field("files", &self.files).finish_non_exhaustive()
    }
}

impl PendingFolder<'_> {
    /// The second half of [`write_folder`]: makes the files a model in the place of the old one.
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
        // No moment shows an index without the files that it names.
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

    /// Gives a model in one file its name.
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

    /// Puts the index, and removes a model in one file, which loaders would prefer.
    async fn put_last(&mut self) -> Published {
        if let Err(error) = self.beside.prepare().await {
            return Published::No(error.into());
        }
        let published = self.put_index().await;
        let single = self.old.files.iter().find(|key| key.as_str() == SINGLE_NAME);
        let (Published::Yes(index), Some(single)) = (&published, single) else { return published };
        let Err(error) = self.storage.delete(single).await else { return published };
        match self.storage.contains(single).await {
            Ok(false) => published,
            // Loaders prefer it, so it is still the model.
            Ok(true) => {
                remove(&**self.storage, index.iter().map(|(key, _)| key)).await;
                Published::No(error.into())
            }
            Err(_) => Published::Unsure(error.into()),
        }
    }

    /// Names the files in the index, where there is to be one.
    async fn put_index(&self) -> Published {
        let Some(json) = self.plan.index_json() else { return Published::Yes(None) };
        let json = Bytes::from(json);
        let key = match Key::new(INDEX_NAME) {
            Ok(key) => key,
            Err(error) => return Published::No(StorageError::from(error).into()),
        };
        let put = |mode| self.storage.put(&key, Payload::from(json.clone()), mode);
        let mode = if self.overwrite { PutMode::Overwrite } else { PutMode::Create };
        let written = Published::Yes(Some((key.clone(), json.len() as u64)));
        let Err(error) = put(mode).await else { return written };
        match self.storage.read_all(&key).await {
            // It is there, and put once more it may be durable, too.
            Ok(found) if found == json => match put(PutMode::Overwrite).await {
                Ok(()) => written,
                Err(_) => Published::Unsure(error.into()),
            },
            Ok(_) => Published::No(error.into()),
            Err(absent) if absent.kind() == StorageErrorKind::NotFound => {
                Published::No(error.into())
            }
            Err(_) => Published::Unsure(error.into()),
        }
    }
}

/// Fails when [`write_folder`] would, because there is a model that is not to be replaced.
///
/// # Errors
///
/// Then, and when the storage fails.
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

/// The files that [`write_folder`] writes and their bytes, under the names they have where none
/// is taken.
///
/// # Errors
///
/// When a header cannot be made.
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

/// What the header of a file says.
fn contents(
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
    /// Set when one file has failed: then the others end, rather than being left behind half
    /// written, and none is begun.
    stop: Arc<AtomicBool>,
}

/// A file and its bytes.
type Done = (Key, u64);

/// Whether the new files are a model.
enum Published {
    /// They are; with the file that made them one.
    Yes(Option<Done>),
    /// They are not.
    No(CheckpointError),
    /// They are, but may not be after a crash of the machine; or it cannot be told.
    Unsure(CheckpointError),
}

impl Job<'_> {
    /// Returns the files that are there, and what went wrong.
    async fn run(&self, progress: Option<&Progress>) -> (Vec<Done>, Result<(), CheckpointError>) {
        let writes: Vec<_> =
            self.plan.files.iter().map(|file| self.write_file(file, progress)).collect();
        let mut results = stream::iter(writes).buffered(self.options.parallelism.max(1));
        let (mut done, mut failed) = (Vec::new(), None);
        while let Some(result) = results.next().await {
            match result {
                Ok(file) => done.push(file),
                // A file that was stopped may come before the one that failed.
                Err(error) => match failed {
                    None | Some(CheckpointError::Canceled) => failed = Some(error),
                    Some(_) => {}
                },
            }
        }
        (done, failed.map_or(Ok(()), Err))
    }

    /// Sends a model in one file, which has no name yet.
    async fn single(
        &self,
        file: &HfFile,
        progress: Option<&Progress>,
    ) -> Result<SingleFile, CheckpointError> {
        let (items, metadata) = contents(self.plan, file, self.options);
        let mode = if self.options.overwrite { PutMode::Overwrite } else { PutMode::Create };
        let how = FileOptions::new(mode).with_in_flight(self.options.parallelism);
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
        progress: Option<&Progress>,
    ) -> Result<Done, CheckpointError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(CheckpointError::Canceled);
        }
        let (items, metadata) = contents(self.plan, file, self.options);
        let data = self.data_of(file);
        let written = write(&**self.storage, &file.name, &items, &metadata, data, progress).await;
        let written = written.inspect_err(|_| self.stop.store(true, Ordering::Relaxed))?;
        Ok((file.name.clone(), written.byte_len))
    }
}

/// The items of one file among those of all.
#[derive(Debug)]
struct OneFile {
    data: Arc<dyn DataSource>,
    parts: Vec<usize>,
    stop: Arc<AtomicBool>,
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
        let part = self.parts.get(item).copied().ok_or_else(|| PlanError::Wire {
            problem: format!("item {item} was asked for, the file has {}", self.parts.len()),
        })?;
        self.data.resolve(part, byte_range).await
    }

    fn segment_bytes(&self) -> u64 {
        self.data.segment_bytes()
    }
}

/// Removes files; returns those that are gone and those that are not.
async fn remove<'a>(
    storage: &dyn Storage,
    keys: impl Iterator<Item = &'a Key>,
) -> (Vec<Key>, Vec<Key>) {
    let (mut removed, mut left) = (Vec::new(), Vec::new());
    for key in keys {
        match storage.delete(key).await {
            Ok(()) => removed.push(key.clone()),
            Err(error) => {
                tracing::warn!(file = %key, %error, "cannot remove a file");
                left.push(key.clone());
            }
        }
    }
    (removed, left)
}
