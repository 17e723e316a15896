//! A checkpoint to read, whatever its format.

pub(crate) mod completeness;
pub(crate) mod decode_cache;
pub(crate) mod list_run;
pub(crate) mod subfolder;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::{
    CheckpointError, CheckpointMetadata, Key, Storage, StorageErrorKind, StorageExt, StorageReader,
};
use dcp_formats::dcp::DcpReader;
use dcp_formats::detect::{Detected, detect};
use dcp_formats::hf::{HfReader, HfReaderBuilder, INDEX_ENDING};
use dcp_formats::torch_save::{MAGIC_LEN, TorchSaveReader, is_torch_save};

use crate::job::JobOptions;
use crate::source::decode_cache::DecodedOnce;

/// A checkpoint to read: its format's reader, and the storage that holds its files.
///
/// A view, which shows other checkpoints differently, is a source too:
/// [`derived`](Self::derived).
#[derive(Clone, Debug)]
pub struct Source {
    /// The bytes, for sizes, checksums and objects that are copied as they are. Placements in
    /// the reader's metadata are places in it.
    pub storage: Arc<dyn Storage>,
    /// The meaning of the bytes.
    pub reader: Arc<dyn StorageReader>,
    /// The same reader, when it is one that knows more than the trait asks for.
    known: Known,
    /// Where objects and tensors of a view are in a file of `torch.save`, as they are.
    kept: Option<Arc<KeptObjects>>,
    /// What compares the bytes that pass through the reader with their checksums.
    comparisons: Vec<Arc<dyn Comparison>>,
}

/// Compares the bytes that pass through the reader of a [`Source`] with their checksums.
#[async_trait]
pub(crate) trait Comparison: fmt::Debug + Send + Sync {
    /// Compares what could not be compared on the way.
    ///
    /// # Errors
    ///
    /// When something is damaged, or the storage fails.
    async fn settle(&self, options: &JobOptions) -> Result<(), CheckpointError>;
}

/// Objects and tensors of a view that are those of one file of `torch.save`.
#[derive(Clone, Debug)]
pub(crate) struct KeptObjects {
    /// The file.
    pub(crate) reader: Arc<TorchSaveReader>,
    /// The FQN in the file, by that in the view.
    pub(crate) names: HashMap<Arc<str>, Arc<str>>,
}

/// A reader of a format that is known here.
#[derive(Clone, Debug)]
enum Known {
    /// PyTorch's own.
    Dcp(Arc<DcpReader>),
    /// Safetensors files.
    Hf(Arc<HfReader>),
    /// A file of `torch.save`.
    TorchSave(Arc<TorchSaveReader>),
    /// Any other.
    Other,
}

/// Whether there is no checkpoint, rather than a bad one.
fn is_missing(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::NotACheckpoint { .. } => true,
        CheckpointError::Storage(error) => error.kind() == StorageErrorKind::NotFound,
        _ => false,
    }
}

impl Source {
    /// A checkpoint whose files lie in `storage` and are understood by `reader`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, reader: Arc<dyn StorageReader>) -> Self {
        Self { storage, reader, known: Known::Other, kept: None, comparisons: Vec::new() }
    }

    /// The checkpoint in a folder, told by what is there: PyTorch's format where there is a
    /// `.metadata`, else safetensors files. With `tolerant`, a damaged one can be looked at as far
    /// as it is whole.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotACheckpoint`] when there is neither
    /// ([`detect`](dcp_formats::detect::detect()) tells what there is instead), and when an index
    /// cannot be read.
    pub async fn open(storage: &Arc<dyn Storage>, tolerant: bool) -> Result<Self, CheckpointError> {
        let source = Self::dcp(Arc::clone(storage), tolerant);
        let missing = match source.metadata().await {
            Ok(_) => return Ok(source),
            Err(error) if is_missing(&error) => error,
            Err(error) => return Err(error),
        };
        match detect(storage).await?.kind {
            Detected::Safetensors { .. } => {
                let source = Self::hf(Arc::clone(storage), tolerant);
                source.metadata().await?;
                Ok(source)
            }
            _ => Err(missing),
        }
    }

    /// The checkpoint in a file, told by what the file begins with: `torch.save`'s formats or
    /// safetensors; or the files that a `*.safetensors.index.json` names.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotACheckpoint`] when it is neither, and when it cannot be read.
    pub async fn open_file(
        storage: &Arc<dyn Storage>,
        key: Key,
        tolerant: bool,
    ) -> Result<Self, CheckpointError> {
        let hf = |options: fn(HfReaderBuilder, Key) -> HfReaderBuilder, key| {
            Self::hf_with(Arc::clone(storage), |reader| options(reader, key).tolerant(tolerant))
        };
        let name = key.file_name().to_owned();
        let source = if name.ends_with(INDEX_ENDING) {
            hf(HfReaderBuilder::index, key)
        } else {
            let len = storage.stat(&key).await?.byte_len;
            let head = storage.read_range(&key, 0..len.min(MAGIC_LEN)).await?;
            if is_torch_save(&head) {
                Self::torch_save(Arc::clone(storage), key)
            } else if head.get(8) == Some(&b'{') || name.ends_with(".safetensors") {
                hf(HfReaderBuilder::file, key)
            } else {
                let message = format!("{key} is no file of torch.save or safetensors");
                return Err(CheckpointError::NotACheckpoint { message });
            }
        };
        source.metadata().await?;
        Ok(source)
    }

    /// A checkpoint in PyTorch's format. With `tolerant`, a damaged one can be looked at as far
    /// as it is whole; otherwise its index must be borne out by its files.
    #[must_use]
    pub fn dcp(storage: Arc<dyn Storage>, tolerant: bool) -> Self {
        let reader = DcpReader::builder(Arc::clone(&storage)).tolerant(tolerant).build();
        let reader = Arc::new(reader);
        Self { known: Known::Dcp(Arc::clone(&reader)), ..Self::new(storage, reader) }
    }

    /// The same, with what this rank has where ranks saved without collectives and differ.
    #[must_use]
    pub fn dcp_of_rank(storage: Arc<dyn Storage>, tolerant: bool, rank: u32) -> Self {
        let reader = DcpReader::builder(Arc::clone(&storage)).tolerant(tolerant).rank(rank);
        let reader = Arc::new(reader.build());
        Self { known: Known::Dcp(Arc::clone(&reader)), ..Self::new(storage, reader) }
    }

    /// One safetensors file.
    #[must_use]
    pub fn safetensors(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self::hf_with(storage, |reader| reader.file(key))
    }

    /// A folder of safetensors files, as Hugging Face models and PyTorch's storage of that name
    /// have them. With `tolerant`, a damaged one can be looked at as far as it is whole.
    #[must_use]
    pub fn hf(storage: Arc<dyn Storage>, tolerant: bool) -> Self {
        Self::hf_with(storage, |reader| reader.tolerant(tolerant))
    }

    /// The same, of another folder, by another index, or with other options of the reader.
    #[must_use]
    pub fn hf_with(
        storage: Arc<dyn Storage>,
        options: impl FnOnce(HfReaderBuilder) -> HfReaderBuilder,
    ) -> Self {
        let reader = Arc::new(options(HfReader::builder(Arc::clone(&storage))).build());
        Self { known: Known::Hf(Arc::clone(&reader)), ..Self::new(storage, reader) }
    }

    /// Files beside a model of safetensors files that hold it in another form, and are not read.
    ///
    /// # Errors
    ///
    /// As [`metadata`](Self::metadata).
    pub async fn variants(&self) -> Result<Arc<[Key]>, CheckpointError> {
        match &self.known {
            Known::Hf(reader) => reader.variants().await,
            _ => Ok(Arc::default()),
        }
    }

    /// One file of `torch.save`.
    #[must_use]
    pub fn torch_save(storage: Arc<dyn Storage>, key: Key) -> Self {
        let reader = Arc::new(TorchSaveReader::new(Arc::clone(&storage), key));
        Self { known: Known::TorchSave(Arc::clone(&reader)), ..Self::new(storage, reader) }
    }

    /// The same, read by `reader`, which does these comparisons.
    pub(crate) fn comparing(
        &self,
        reader: Arc<dyn StorageReader>,
        comparisons: Vec<Arc<dyn Comparison>>,
    ) -> Self {
        let (storage, known) = (Arc::clone(&self.storage), self.known.clone());
        Self { storage, reader, known, kept: self.kept.clone(), comparisons }
    }

    /// What compares the bytes that pass through the reader; nothing in a source of which no job has
    /// begun to read.
    pub(crate) fn comparisons(&self) -> &[Arc<dyn Comparison>] {
        &self.comparisons
    }

    /// The reader for a job of `parallelism` reads that looks after checksums itself.
    pub(crate) fn decoded_once(&self, parallelism: usize) -> Arc<dyn StorageReader> {
        Arc::new(DecodedOnce::new(Arc::clone(&self.reader), parallelism))
    }

    /// The reader, when it is one of PyTorch's format.
    #[must_use]
    pub fn dcp_reader(&self) -> Option<&Arc<DcpReader>> {
        if let Known::Dcp(reader) = &self.known { Some(reader) } else { None }
    }

    /// The reader, when it is one of safetensors files.
    pub(crate) fn hf_reader(&self) -> Option<&Arc<HfReader>> {
        if let Known::Hf(reader) = &self.known { Some(reader) } else { None }
    }

    /// The reader, when it is one of a file of `torch.save`.
    #[must_use]
    pub fn save_reader(&self) -> Option<&Arc<TorchSaveReader>> {
        if let Known::TorchSave(reader) = &self.known { Some(reader) } else { None }
    }

    /// The same view, of which these objects are those of a file of `torch.save`.
    pub(crate) fn keeping(mut self, kept: Option<Arc<KeptObjects>>) -> Self {
        self.kept = kept;
        self
    }

    /// Its objects that are those of a file of `torch.save`.
    pub(crate) fn kept(&self) -> Option<&Arc<KeptObjects>> {
        self.kept.as_ref()
    }

    /// The checkpoint's index.
    ///
    /// # Errors
    ///
    /// When there is no checkpoint, or its index is bad.
    pub async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        self.reader.metadata().await
    }
}
