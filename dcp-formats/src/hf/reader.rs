//! Reading a folder of safetensors files as a checkpoint.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DataSink, Key, LoadPlan, ReadReport, Storage,
    StorageReader,
};
use futures_util::lock::Mutex;

use super::finding::Finding;
use super::load::{Loaded, Target, load};
use crate::dcp::read::{Context, run};
use crate::upload::Progress;

const SCRATCH_BYTES: u64 = 64 << 20;

/// Reads a folder of safetensors files, or one file.
///
/// With a `*.safetensors.index.json` the index says which file holds which tensor, and nothing is
/// listed; files that it does not name are left alone. Without one, all `*.safetensors` of the
/// folder are the checkpoint, but not those in folders below it (PyTorch's consolidation leaves
/// the ranks' files in `sharded`: read that folder with [`HfReaderBuilder::folder`]) and not the
/// variants of others there, such as `model.fp16.safetensors` beside `model.safetensors`.
///
/// Headers may say that a tensor is a part of a larger one (`DCP_SHARDING_INFO`, PyTorch 2.8 and
/// later). The whole is as large as its parts reach, as in PyTorch; unlike there, 0-dim and
/// integer tensors are right, and a tensor that is in two files without such information is an
/// error instead of whichever comes last.
///
/// All headers are read once, at first use, several at a time. Of the tensors only the bytes that
/// a plan asks for are read. The format has no checksums.
pub struct HfReader {
    storage: Arc<dyn Storage>,
    target: Target,
    tolerant: bool,
    scratch_bytes: u64,
    progress: Option<Progress>,
    loaded: Mutex<Option<Loaded>>,
}

/// Options of an [`HfReader`].
#[must_use = "call `build`"]
pub struct HfReaderBuilder {
    reader: HfReader,
}

impl HfReader {
    /// A reader of the folder that `storage` is.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self::builder(storage).build()
    }

    /// A reader of one file, which need not end in `.safetensors`.
    #[must_use]
    pub fn file(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self::builder(storage).file(key).build()
    }

    /// A reader with options.
    pub fn builder(storage: Arc<dyn Storage>) -> HfReaderBuilder {
        let reader = Self {
            storage,
            target: Target::Folder(None),
            tolerant: false,
            scratch_bytes: SCRATCH_BYTES,
            progress: None,
            loaded: Mutex::new(None),
        };
        HfReaderBuilder { reader }
    }

    /// What is wrong with the folder, beyond what its metadata and the lengths of its files show;
    /// only a tolerant reader comes to say it.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn findings(&self) -> Result<Arc<[Finding]>, CheckpointError> {
        Ok(self.loaded().await?.findings)
    }

    /// What is odd about the folder but does not keep it from being read.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn notes(&self) -> Result<Arc<[String]>, CheckpointError> {
        Ok(self.loaded().await?.notes)
    }

    /// Files of the folder that hold the model in another form, such as
    /// `model.fp16.safetensors` beside `model.safetensors`, and are not read.
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
    /// Reads this folder of the storage, such as `sharded`; by default the storage itself.
    pub fn folder(mut self, folder: Key) -> Self {
        self.reader.target = Target::Folder(Some(folder));
        self
    }

    /// Reads the files that this index names, relative to where it lies.
    pub fn index(mut self, index: Key) -> Self {
        self.reader.target = Target::Index(index);
        self
    }

    /// Reads the variant of this name of the model in the storage, such as `fp16`.
    pub fn variant(mut self, variant: impl Into<String>) -> Self {
        self.reader.target = Target::Variant(None, variant.into());
        self
    }

    /// Reads one file.
    pub fn file(mut self, file: Key) -> Self {
        self.reader.target = Target::File(file);
        self
    }

    /// Whether to show what there is of a damaged folder. Then what is wrong is in
    /// [`HfReader::findings`], and an error only when such a part is read. By default it is an
    /// error at once.
    pub fn tolerant(mut self, tolerant: bool) -> Self {
        self.reader.tolerant = tolerant;
        self
    }

    /// The memory for what cannot be read straight into place, in bytes; 64 MiB by default.
    pub fn scratch_bytes(mut self, bytes: u64) -> Self {
        self.reader.scratch_bytes = bytes;
        self
    }

    /// Is told how many of the bytes that the plan needs have arrived, request by request.
    pub fn progress(mut self, progress: Progress) -> Self {
        self.reader.progress = Some(progress);
        self
    }

    /// The reader.
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
