//! Reads PyTorch DCP checkpoints.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::format::{ListedStorage, StreamTransforms, WantedKeys};
use dcp_core::plan::LoadPlan;
use dcp_core::storage::StorageExt as _;
use dcp_core::{
    CheckpointError, CheckpointMetadata, Dims, Key, Storage, StorageError, StorageErrorKind,
    StorageReader,
};
use futures_util::lock::Mutex;

use super::by_rank::Differing;
use super::index::{Index, IndexOptions, load};
use super::names::sidecar;
use super::sidecar::Sidecar;
use crate::pickle::ForeignName;
use crate::placed_reads::{Context, KnownArchives, SCRATCH_BYTES, SavedCrcs, SavedSource, run};
use crate::upload::ByteProgress;

/// Reads PyTorch DCP checkpoints: those of `FileSystemWriter` since PyTorch 2.1 in all variants
/// (files per rank or per item, zstd extension, safetensors serialization, rank-local metadata),
/// and those of [`DcpWriter`](super::DcpWriter).
///
/// Reads and checks the index once, and the lengths of all files with it, so a missing or short
/// file fails before any data is read. Reads only the bytes of a tensor that the plan needs, and
/// contiguous ones straight into their destination.
///
/// Every file has one version for all reads: one that is replaced meanwhile is an error, where the
/// storage has [versions](dcp_core::storage::Capabilities::versions).
///
/// Checks the CRC-32 of a tensor when all of it is read, in one or more pieces. A part alone cannot
/// be checked.
pub struct DcpReader {
    storage: Arc<dyn Storage>,
    verify_checksums: bool,
    verify_parts: bool,
    compare_saved: bool,
    how: IndexOptions,
    scratch_bytes: u64,
    transforms: StreamTransforms,
    progress: Option<ByteProgress>,
    index: Mutex<Option<Index>>,
    saved: Arc<Mutex<Option<Arc<SavedCrcs>>>>,
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
            storage: Arc::new(ListedStorage::unlisted(storage)),
            verify_checksums: true,
            verify_parts: true,
            compare_saved: false,
            how: IndexOptions { tolerant: false, check_files: true, rank: None, keys: None },
            scratch_bytes: SCRATCH_BYTES,
            transforms: StreamTransforms::default(),
            progress: None,
            index: Mutex::new(None),
            saved: Arc::default(),
            archives: Arc::default(),
        };
        DcpReaderBuilder { reader }
    }

    /// The storage of the folder.
    pub(super) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The transforms of items that this reader undoes besides zstd.
    #[must_use]
    pub fn transforms(&self) -> &StreamTransforms {
        &self.transforms
    }

    /// Observations about the checkpoint that do not prevent reading it.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn warnings(&self) -> Result<Arc<[String]>, CheckpointError> {
        Ok(self.index().await?.warnings)
    }

    /// All keys and files of the index, without chunks, where [`keys`](DcpReaderBuilder::keys) left
    /// tensors out of the metadata.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn names(&self) -> Result<Option<Arc<CheckpointMetadata>>, CheckpointError> {
        Ok(self.index().await?.names)
    }

    /// The sidecar that [`DcpWriter`](super::DcpWriter) wrote; `None` for checkpoints without one,
    /// such as PyTorch's own.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`], and when the sidecar is damaged.
    pub async fn sidecar(&self) -> Result<Option<Sidecar>, CheckpointError> {
        let index = self.index().await?;
        match index.crc32.filter(|_| index.has_sidecar) {
            Some(crc32) => read_sidecar(&*self.storage, crc32).await,
            None => Ok(None),
        }
    }

    /// The shapes of tensors for Megatron-Core (0.8 to 0.15), in elements, by key, where the index
    /// has another shape; see
    /// [`Decoded::original_shapes`](crate::metadata::Decoded::original_shapes).
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn original_shapes(&self) -> Result<Arc<HashMap<Arc<str>, Dims>>, CheckpointError> {
        Ok(self.index().await?.original_shapes)
    }

    /// The names in the `.metadata` that Python imports when it loads it, and that are not known to
    /// be harmless.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn foreign_names(&self) -> Result<Arc<[ForeignName]>, CheckpointError> {
        Ok(self.index().await?.foreign_names)
    }

    /// Tensors and objects that differ between the ranks of a save without collectives
    /// (`use_collectives=False` in PyTorch 2.15, which loads each rank's own). The reader reads
    /// those of [`DcpReaderBuilder::rank`], or else those of the lowest rank.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn differing(&self) -> Result<Arc<[Differing]>, CheckpointError> {
        Ok(self.index().await?.differing)
    }

    /// The [`warnings`](Self::warnings) about ranks that saved without collectives: a missing rank,
    /// differences, or ranks of an earlier save.
    ///
    /// # Errors
    ///
    /// As [`StorageReader::metadata`].
    pub async fn rank_warnings(&self) -> Result<Arc<[String]>, CheckpointError> {
        Ok(self.index().await?.rank_warnings)
    }

    /// The CRC-32s in the sidecar, by file; none where no listing shows a sidecar, or it is damaged.
    pub(super) async fn saved_checksums(&self) -> Result<Arc<SavedCrcs>, CheckpointError> {
        self.saved_source().await?.saved().await
    }

    async fn saved_source(&self) -> Result<SavedInSidecar, CheckpointError> {
        let index = self.index().await?;
        let is_compared = self.verify_checksums && index.has_sidecar;
        Ok(SavedInSidecar {
            storage: Arc::clone(&self.storage),
            metadata: index.crc32.filter(|_| is_compared),
            read: Arc::clone(&self.saved),
        })
    }

    async fn index(&self) -> Result<Index, CheckpointError> {
        let mut index = self.index.lock().await;
        if let Some(index) = &*index {
            return Ok(index.clone());
        }
        let loaded = load(&self.storage, &self.how).await?;
        Ok(index.insert(loaded).clone())
    }
}

/// The CRC-32s in the sidecar of a `.metadata`, which all reads of a reader share.
struct SavedInSidecar {
    storage: Arc<dyn Storage>,
    /// The CRC-32 of the `.metadata`; `None` for no sidecar.
    metadata: Option<u32>,
    read: Arc<Mutex<Option<Arc<SavedCrcs>>>>,
}

#[async_trait]
impl SavedSource for SavedInSidecar {
    async fn saved(&self) -> Result<Arc<SavedCrcs>, CheckpointError> {
        let mut read = self.read.lock().await;
        if let Some(saved) = &*read {
            return Ok(Arc::clone(saved));
        }
        let sidecar = match self.metadata {
            Some(crc32) => read_sidecar(&*self.storage, crc32).await,
            None => Ok(None),
        };
        let sidecar = match sidecar {
            Err(CheckpointError::Format(error)) => {
                tracing::warn!(%error, "chunks are not compared with the sidecar");
                None
            }
            sidecar => sidecar?,
        };
        let files = sidecar.into_iter().flat_map(|sidecar| sidecar.files);
        let files = files.filter(|file| !file.chunks.is_empty());
        let by_key = files.filter_map(|file| Some((Key::new(file.name).ok()?, file.chunks)));
        Ok(Arc::clone(read.insert(Arc::new(by_key.collect()))))
    }
}

async fn read_sidecar(
    storage: &dyn Storage,
    metadata: u32,
) -> Result<Option<Sidecar>, CheckpointError> {
    let key = sidecar(metadata).map_err(StorageError::from)?;
    match storage.read_all(&key).await {
        Ok(bytes) => Sidecar::decode(&bytes, metadata)
            .map(Some)
            .map_err(|error| error.in_file(key.as_str(), 0).into()),
        Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl DcpReaderBuilder {
    /// Whether CRCs are checked; the default is true.
    pub fn verify_checksums(mut self, verify: bool) -> Self {
        self.reader.verify_checksums = verify;
        self
    }

    /// Whether the CRC of a large chunk that several reads cover together, as in a load onto a device,
    /// is checked by the last of them; the default is true. Readers that check what they read
    /// themselves do without.
    pub fn verify_parts(mut self, verify: bool) -> Self {
        self.reader.verify_parts = verify;
        self
    }

    /// Whether reads compare the checksum in each archive with that in the sidecar, so that a file of
    /// another save is an error. That costs one request; the default is false, because in a group
    /// each rank would make it. Checks and jobs always compare.
    pub fn compare_saved(mut self, compare: bool) -> Self {
        self.reader.compare_saved = compare;
        self
    }

    /// Whether to accept a contradictory index, to look at a damaged checkpoint: missing or short
    /// files, chunks outside their tensor or overlapping. The reader then warns, and fails only
    /// when it reads such a part. The default is false.
    pub fn tolerant(mut self, tolerant: bool) -> Self {
        self.reader.how.tolerant = tolerant;
        self
    }

    /// Whether the folder is listed with the index, so that a missing or short file fails before any
    /// data is read; the default is true. Without the listing, a rank requests `.metadata` and what it
    /// needs of the files, each of which fails when it is read. That saves each rank a request, and at
    /// a web server, which lists nothing, one for every file of the checkpoint. Tensors in images of
    /// safetensors need the lengths of the files all the same.
    pub fn check_files(mut self, check: bool) -> Self {
        self.reader.how.check_files = check;
        self
    }

    /// The rank whose tensors and objects are read if ranks saved without collectives and differ.
    pub fn rank(mut self, rank: u32) -> Self {
        self.reader.how.rank = Some(rank);
        self
    }

    /// The tensors that are read; by default all. Others are not in the metadata, and their chunks
    /// are not decoded: a part of a large checkpoint is opened in less time and memory. Objects are
    /// all there. Of the others it is not checked whether their chunks fit, overlap or leave holes,
    /// nor whether their files are there and long enough.
    pub fn keys(mut self, keys: WantedKeys) -> Self {
        self.reader.how.keys = Some(keys);
        self
    }

    /// The memory for what cannot be read straight into place, in bytes; 64 MiB by default. A
    /// tensor that must be read whole (compressed, transposed) may exceed it. A compressed item may
    /// expand to this size, to 64 MiB or to 256 times its stored size, whichever is larger; a chunk
    /// also to 1 GiB or twice the requested bytes, an object to no more than 1 GiB. Larger items are
    /// errors; `DcpWriterBuilder::zstd` writes none.
    pub fn scratch_bytes(mut self, bytes: u64) -> Self {
        self.reader.scratch_bytes = bytes;
        self
    }

    /// The transforms of items that are undone besides zstd; none by default.
    pub fn transforms(mut self, transforms: StreamTransforms) -> Self {
        self.reader.transforms = transforms;
        self
    }

    /// Receives the number of bytes of the plan that each request read.
    pub fn progress(mut self, progress: ByteProgress) -> Self {
        self.reader.progress = Some(progress);
        self
    }

    /// Builds the reader.
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
        if self.compare_saved {
            context.archives.saved = Some(Arc::new(self.saved_source().await?));
        }
        context.archives.known = Some(Arc::clone(&self.archives));
        context.archives.verify_parts = self.verify_parts;
        context.transforms = self.transforms.clone();
        run(Arc::new(context), metadata, plan).await
    }
}

impl fmt::Debug for DcpReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DcpReader")
            .field("storage", &self.storage)
            .field("verify_checksums", &self.verify_checksums)
            .field("verify_parts", &self.verify_parts)
            .field("scratch_bytes", &self.scratch_bytes)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for DcpReaderBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DcpReaderBuilder").field(&self.reader).finish()
    }
}
