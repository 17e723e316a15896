//! Loading PyTorch's layout.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DataSink, Dims, LoadPlan, ReadReport, Storage,
    StorageError, StorageErrorKind, StorageExt as _, StorageReader,
};
use futures_util::lock::Mutex;

use super::by_rank::Differing;
use super::direct::KnownArchives;
use super::index::{Index, load};
use super::names::sidecar;
use super::read::{Context, SCRATCH_BYTES, run};
use super::sidecar::Sidecar;
use crate::pickle::ForeignName;
use crate::upload::Progress;

/// Reads checkpoints of PyTorch's DCP: those of `FileSystemWriter` from PyTorch 2.1 on, in all its
/// variants (files per rank or per item, zstd extension, safetensors serialization, rank-local
/// metadata), and those of [`DcpWriter`](super::DcpWriter).
///
/// The index is read and checked once; every file is looked at, so that a missing or short one
/// is noticed before any data is read. Of a stored tensor only the bytes that the plan asks for
/// are read, straight into their destination where they lie together.
///
/// The CRC-32 of a tensor is checked whenever all of it is read, in however many pieces; a part
/// alone cannot be checked.
pub struct DcpReader {
    storage: Arc<dyn Storage>,
    verify_checksums: bool,
    tolerant: bool,
    scratch_bytes: u64,
    progress: Option<Progress>,
    rank: Option<u32>,
    index: Mutex<Option<Index>>,
    archives: Arc<KnownArchives>,
}

/// Options of a [`DcpReader`].
#[must_use = "call `build`"]
pub struct DcpReaderBuilder {
    reader: DcpReader,
}

impl DcpReader {
    /// A reader that checks everything.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self::builder(storage).build()
    }

    /// A reader with options.
    pub fn builder(storage: Arc<dyn Storage>) -> DcpReaderBuilder {
        let reader = Self {
            storage,
            verify_checksums: true,
            tolerant: false,
            scratch_bytes: SCRATCH_BYTES,
            progress: None,
            rank: None,
            index: Mutex::new(None),
            archives: Arc::default(),
        };
        DcpReaderBuilder { reader }
    }

    /// What is odd about the checkpoint but does not keep it from being read.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn warnings(&self) -> Result<Arc<[String]>, CheckpointError> {
        Ok(self.index().await?.warnings)
    }

    /// What [`DcpWriter`](super::DcpWriter) noted beside the checkpoint; `None` where there is
    /// none, as in PyTorch's own.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`], and when there is a sidecar that is damaged.
    pub async fn sidecar(&self) -> Result<Option<Sidecar>, CheckpointError> {
        let Some(crc32) = self.index().await?.crc32 else { return Ok(None) };
        let key = sidecar(crc32).map_err(StorageError::from)?;
        match self.storage.read_all(&key).await {
            Ok(bytes) => Sidecar::decode(&bytes, crc32)
                .map(Some)
                .map_err(|error| error.in_file(key.as_str(), 0).into()),
            Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The shapes, in elements, that tensors have for Megatron-Core (0.8 to 0.15), by key, where
    /// the index says another one; see
    /// [`Decoded::original_shapes`](crate::metadata::Decoded::original_shapes).
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn original_shapes(&self) -> Result<Arc<HashMap<Arc<str>, Dims>>, CheckpointError> {
        Ok(self.index().await?.original_shapes)
    }

    /// The names in the `.metadata` that Python would import where it is loaded, and that are not
    /// known to be harmless.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn foreign_names(&self) -> Result<Arc<[ForeignName]>, CheckpointError> {
        Ok(self.index().await?.foreign_names)
    }

    /// Tensors and objects that are not the same on all ranks of a save without collectives
    /// (`use_collectives=False` in PyTorch 2.15, where each rank loads its own). Those of the rank
    /// that [`DcpReaderBuilder::rank`] names are read, or else those of the lowest one.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn differing(&self) -> Result<Arc<[Differing]>, CheckpointError> {
        Ok(self.index().await?.differing)
    }

    /// Those of the [`warnings`](Self::warnings) that are about ranks that saved without
    /// collectives: one is missing, they differ, or some are of an earlier save.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn rank_warnings(&self) -> Result<Arc<[String]>, CheckpointError> {
        Ok(self.index().await?.rank_warnings)
    }

    async fn index(&self) -> Result<Index, CheckpointError> {
        let mut index = self.index.lock().await;
        if let Some(index) = &*index {
            return Ok(index.clone());
        }
        let loaded = load(&self.storage, self.tolerant, self.rank).await?;
        Ok(index.insert(loaded).clone())
    }
}

impl DcpReaderBuilder {
    /// Whether CRCs are checked; by default they are.
    pub fn verify_checksums(mut self, verify: bool) -> Self {
        self.reader.verify_checksums = verify;
        self
    }

    /// Whether to take an index that is not borne out, for looking at a damaged checkpoint: files
    /// missing or short, chunks outside of their tensor or over each other. Then it is a warning,
    /// and an error only when such a part is read. By default it is an error at once.
    pub fn tolerant(mut self, tolerant: bool) -> Self {
        self.reader.tolerant = tolerant;
        self
    }

    /// Whose tensors and objects are read where ranks saved without collectives and differ.
    pub fn rank(mut self, rank: u32) -> Self {
        self.reader.rank = Some(rank);
        self
    }

    /// The memory for what cannot be read straight into place, in bytes; 64 MiB by default. One
    /// tensor that has to be read as a whole (compressed, transposed) may take more. A compressed
    /// item may become as large as this, or 256 times its stored bytes, where those are more; a
    /// chunk also 1 GiB, or twice what is wanted of it. Anything larger is an error.
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
    pub fn build(self) -> DcpReader {
        self.reader
    }
}

#[async_trait]
impl StorageReader for DcpReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(self.index().await?.metadata)
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut context = Context::new(
            Arc::clone(&self.storage),
            sink,
            self.verify_checksums,
            self.scratch_bytes,
            self.progress.clone(),
        );
        context.archives = Some(Arc::clone(&self.archives));
        run(Arc::new(context), metadata, plan).await
    }
}

impl fmt::Debug for DcpReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcpReader")
            .field("storage", &self.storage)
            .field("verify_checksums", &self.verify_checksums)
            .field("scratch_bytes", &self.scratch_bytes)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for DcpReaderBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DcpReaderBuilder").field(&self.reader).finish()
    }
}
