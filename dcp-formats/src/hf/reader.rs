//! Reads a folder of safetensors files as a checkpoint.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::format::ListedStorage;
use dcp_core::plan::LoadPlan;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, Storage, StorageReader};
use futures_util::lock::Mutex;

use super::finding::Finding;
use super::load::{Loaded, Target, load};
use crate::placed_reads::{Context, run};
use crate::upload::ByteProgress;

const SCRATCH_BYTES: u64 = 64 << 20;

/// Reads a folder of safetensors files, or one file.
///
/// With a `*.safetensors.index.json`, the index gives the file of each tensor, nothing is listed,
/// and other files are ignored. Without one, the checkpoint is all `*.safetensors` files of the
/// folder, except those in subfolders (PyTorch's consolidation leaves the ranks' files in
/// `sharded`; read them with [`HfReaderBuilder::folder`]) and except variants, such as
/// `model.fp16.safetensors` next to `model.safetensors`.
///
/// Headers may declare a tensor as a part of a larger one (`DCP_SHARDING_INFO`, PyTorch 2.8 and
/// later). The tensor's shape is the extent of its parts, as in PyTorch. Unlike there, 0-dim and
/// integer tensors are read correctly, and a tensor in two files without such information is an
/// error, not the last one found.
///
/// Reads all headers once, at first use, several at a time. Reads only the bytes of tensors that a
/// plan needs. The format has no checksums.
pub struct HfReader {
    storage: Arc<dyn Storage>,
    target: Target,
    tolerant: bool,
    scratch_bytes: u64,
    progress: Option<ByteProgress>,
    loaded: Mutex<Option<Loaded>>,
}

/// Options of an [`HfReader`].
#[must_use = "call `build`"]
pub struct HfReaderBuilder {
    reader: HfReader,
}

impl HfReader {
    /// A reader of the root folder of `storage`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self::builder(storage).build()
    }

    /// A reader of one file, with any ending.
    #[must_use]
    pub fn file(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self::builder(storage).file(key).build()
    }

    /// A reader with options.
    pub fn builder(storage: Arc<dyn Storage>) -> HfReaderBuilder {
        let reader = Self {
            storage: Arc::new(ListedStorage::unlisted(storage)),
            target: Target::Folder(None),
            tolerant: false,
            scratch_bytes: SCRATCH_BYTES,
            progress: None,
            loaded: Mutex::new(None),
        };
        HfReaderBuilder { reader }
    }

    /// The storage of the folder.
    pub(super) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// Problems of the folder that its metadata and the lengths of its files do not show. Only a
    /// tolerant reader returns any.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn findings(&self) -> Result<Arc<[Finding]>, CheckpointError> {
        Ok(self.loaded().await?.findings)
    }

    /// Observations about the folder that do not prevent reading it.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn notes(&self) -> Result<Arc<[String]>, CheckpointError> {
        Ok(self.loaded().await?.notes)
    }

    /// Files of the folder that hold the model in another form, such as `model.fp16.safetensors`
    /// next to `model.safetensors`. The reader ignores them.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn variants(&self) -> Result<Arc<[Key]>, CheckpointError> {
        Ok(self.loaded().await?.variants)
    }

    async fn loaded(&self) -> Result<Loaded, CheckpointError> {
        let mut loaded = self.loaded.lock().await;
        if let Some(loaded) = &*loaded {
            return Ok(loaded.clone());
        }
        let fresh = load(&self.storage, &self.target, self.tolerant).await?;
        Ok(loaded.insert(fresh).clone())
    }
}

impl HfReaderBuilder {
    /// Reads this folder of the storage, such as `sharded`, instead of the root.
    pub fn folder(mut self, folder: Key) -> Self {
        self.reader.target = Target::Folder(Some(folder));
        self
    }

    /// Reads the files that this index names, relative to the index.
    pub fn index(mut self, index: Key) -> Self {
        self.reader.target = Target::Index(index);
        self
    }

    /// Reads this variant of the model, such as `fp16`.
    pub fn variant(mut self, variant: impl Into<String>) -> Self {
        self.reader.target = Target::Variant(None, variant.into());
        self
    }

    /// Reads one file.
    pub fn file(mut self, file: Key) -> Self {
        self.reader.target = Target::File(file);
        self
    }

    /// Whether to open a damaged folder. Its problems are then in [`HfReader::findings`], and
    /// errors only when such a part is read. The default is false.
    pub fn tolerant(mut self, tolerant: bool) -> Self {
        self.reader.tolerant = tolerant;
        self
    }

    /// The memory for what cannot be read straight into place, in bytes; 64 MiB by default.
    pub fn scratch_bytes(mut self, bytes: u64) -> Self {
        self.reader.scratch_bytes = bytes;
        self
    }

    /// Receives the number of bytes of the plan that each request read.
    pub fn progress(mut self, progress: ByteProgress) -> Self {
        self.reader.progress = Some(progress);
        self
    }

    /// Builds the reader.
    #[must_use]
    pub fn build(self) -> HfReader {
        self.reader
    }
}

#[async_trait]
impl StorageReader for HfReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(self.loaded().await?.metadata)
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let (storage, progress) = (Arc::clone(&self.storage), self.progress.clone());
        let context = Context::new(storage, sink, false, self.scratch_bytes, progress);
        run(Arc::new(context), metadata, plan).await
    }
}

impl fmt::Debug for HfReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HfReader")
            .field("storage", &self.storage)
            .field("target", &self.target)
            .field("tolerant", &self.tolerant)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for HfReaderBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HfReaderBuilder").field(&self.reader).finish()
    }
}
