//! Writes a folder of safetensors files.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::DataSource;
use dcp_core::storage::{OwnThreads, PutMode};
use dcp_core::{CheckpointError, Key, Payload, PlanError, Storage, StorageError};
use futures_util::{StreamExt as _, stream};
use indexmap::IndexMap;

use super::index_file::INDEX_NAME;
use super::layout::{HfFile, HfPlan};
use super::pending_folder::{PendingFolder, remove};
use super::replaced::Old;
use super::sidecar_files::SidecarFiles;
use super::single::SingleFile;
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
/// ([`AlreadyExists`](dcp_core::StorageErrorKind::AlreadyExists)); when a header cannot be encoded;
/// when the data or the storage fails. Everything written is then removed, unless the new index is
/// or may be in place: then nothing that it names is removed.
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
    let folder = choose_folder(storage, plan, options).await?;
    let all = 0..folder.plan().files.len();
    folder.write(data, all, progress).await
}

/// The first step of [`prepare_folder`]: looks at the folder, writes nothing and chooses names that
/// are free. Several processes that write a model together all choose before one of them writes.
///
/// # Errors
///
/// As [`write_folder`] before anything is written.
pub async fn choose_folder<'a>(
    storage: &'a Arc<dyn Storage>,
    plan: &HfPlan,
    options: &'a HfWriteOptions,
) -> Result<ChosenFolder<'a>, CheckpointError> {
    let old = Old::look(&**storage, plan).await?;
    old.refuse(plan, options)?;
    let replaces = (old.in_the_way(plan).is_some(), options.overwrite);
    let beside = SidecarFiles::look(&**storage, &options.beside, replaces).await?;
    let plan = old.free_names(plan)?;
    Ok(ChosenFolder { storage, options, old, beside, plan })
}

/// A folder in which the names of a model's files were chosen.
pub struct ChosenFolder<'a> {
    storage: &'a Arc<dyn Storage>,
    options: &'a HfWriteOptions,
    old: Old,
    beside: SidecarFiles<'a>,
    plan: HfPlan,
}

impl fmt::Debug for ChosenFolder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChosenFolder").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl<'a> ChosenFolder<'a> {
    /// The plan, with the chosen names.
    #[must_use]
    pub fn plan(&self) -> &HfPlan {
        &self.plan
    }

    /// Whether the model is one file, which gets its name last, from the process that wrote it.
    #[must_use]
    pub fn is_single_file(&self) -> bool {
        self.plan.single().is_some()
    }

    /// Writes the files of these positions of the plan.
    ///
    /// # Errors
    ///
    /// As [`write_folder`]. Everything written is then removed.
    pub async fn write(
        self,
        data: Arc<dyn DataSource>,
        share: Range<usize>,
        progress: Option<&ByteProgress>,
    ) -> Result<PendingFolder<'a>, CheckpointError> {
        let Self { storage, options, old, beside, plan } = self;
        let job = Job { storage, plan: &plan, data: &data, options, stop: Arc::default() };
        let (files, single) = match plan.single() {
            Some(file) if share.contains(&0) => {
                (Vec::new(), Some(job.single(file, progress).await?))
            }
            Some(_) => (Vec::new(), None),
            None => match job.run(share, progress).await {
                (files, Ok(())) => (files, None),
                (files, Err(error)) => {
                    remove(&**storage, files.iter().map(|(key, _)| key)).await;
                    return Err(error);
                }
            },
        };
        let overwrite = options.overwrite;
        Ok(PendingFolder { storage, overwrite, old, beside, plan, files, single })
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
pub(super) type Done = (Key, u64);

impl Job<'_> {
    /// Returns the files that exist, and the first error.
    async fn run(
        &self,
        share: Range<usize>,
        progress: Option<&ByteProgress>,
    ) -> (Vec<Done>, Result<(), CheckpointError>) {
        let files = self.plan.files.get(share).unwrap_or_default();
        let writes: Vec<_> = files.iter().map(|file| self.write_file(file, progress)).collect();
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
            .ok_or(PlanError::no_item(item as u64, self.parts.len() as u64))?;
        self.data.resolve(part, byte_range).await
    }

    fn segment_bytes(&self) -> u64 {
        self.data.segment_bytes()
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        self.data.own_threads()
    }
}
