//! A checkpoint to read, whatever its format.

pub(crate) mod decode_cache;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::OpenedCheckpoint;
use dcp_core::{CheckpointError, CheckpointMetadata, Key, Storage, StorageReader};
use dcp_formats::dcp::DcpReader;
use dcp_formats::hf::{HfReader, HfReaderBuilder};
use dcp_formats::torch_save::TorchSaveReader;

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
    /// The same reader under its own type, an `Arc<R>`, for what it does beyond the trait.
    concrete: Option<Arc<dyn Any + Send + Sync>>,
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

/// A checkpoint that a format has opened: the [`Source`] that it gives as an extension, or its
/// reader.
impl From<OpenedCheckpoint> for Source {
    fn from(opened: OpenedCheckpoint) -> Self {
        if let Some(source) = opened.extension::<Self>() {
            return (*source).clone();
        }
        let storage = Arc::clone(&opened.storage);
        if let Some(reader) = opened.extension::<DcpReader>() {
            return Self::of(storage, reader);
        }
        if let Some(reader) = opened.extension::<HfReader>() {
            return Self::of(storage, reader);
        }
        if let Some(reader) = opened.extension::<TorchSaveReader>() {
            return Self::of(storage, reader);
        }
        Self::new(storage, opened.reader)
    }
}

impl Source {
    /// A checkpoint whose files lie in `storage` and are understood by `reader`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, reader: Arc<dyn StorageReader>) -> Self {
        Self { storage, reader, concrete: None, kept: None, comparisons: Vec::new() }
    }

    /// The same, for a reader whose own type jobs can ask for.
    fn of<R: StorageReader + 'static>(storage: Arc<dyn Storage>, reader: Arc<R>) -> Self {
        let concrete: Arc<dyn Any + Send + Sync> = Arc::new(Arc::clone(&reader));
        Self { concrete: Some(concrete), ..Self::new(storage, reader) }
    }

    /// The reader, when it is of that type.
    fn reader_as<R: StorageReader + 'static>(&self) -> Option<&Arc<R>> {
        self.concrete.as_ref()?.downcast_ref()
    }

    /// A checkpoint in PyTorch's format. With `tolerant`, a damaged one can be looked at as far
    /// as it is whole; otherwise its index must be borne out by its files.
    #[must_use]
    pub fn dcp(storage: Arc<dyn Storage>, tolerant: bool) -> Self {
        let reader = DcpReader::builder(Arc::clone(&storage)).tolerant(tolerant).build();
        Self::of(storage, Arc::new(reader))
    }

    /// The same, with what this rank has where ranks saved without collectives and differ.
    #[must_use]
    pub fn dcp_of_rank(storage: Arc<dyn Storage>, tolerant: bool, rank: u32) -> Self {
        let reader = DcpReader::builder(Arc::clone(&storage)).tolerant(tolerant).rank(rank);
        Self::of(storage, Arc::new(reader.build()))
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
        Self::of(storage, reader)
    }

    /// Files beside a model of safetensors files that hold it in another form, and are not read.
    ///
    /// # Errors
    ///
    /// As [`metadata`](Self::metadata).
    pub async fn variants(&self) -> Result<Arc<[Key]>, CheckpointError> {
        match self.hf_reader() {
            Some(reader) => reader.variants().await,
            None => Ok(Arc::default()),
        }
    }

    /// One file of `torch.save`.
    #[must_use]
    pub fn torch_save(storage: Arc<dyn Storage>, key: Key) -> Self {
        let reader = Arc::new(TorchSaveReader::new(Arc::clone(&storage), key));
        Self::of(storage, reader)
    }

    /// The same, read by `reader`, which does these comparisons.
    pub(crate) fn comparing(
        &self,
        reader: Arc<dyn StorageReader>,
        comparisons: Vec<Arc<dyn Comparison>>,
    ) -> Self {
        let (storage, concrete) = (Arc::clone(&self.storage), self.concrete.clone());
        Self { storage, reader, concrete, kept: self.kept.clone(), comparisons }
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
        self.reader_as()
    }

    /// The reader, when it is one of safetensors files.
    pub(crate) fn hf_reader(&self) -> Option<&Arc<HfReader>> {
        self.reader_as()
    }

    /// The reader, when it is one of a file of `torch.save`.
    #[must_use]
    pub fn save_reader(&self) -> Option<&Arc<TorchSaveReader>> {
        self.reader_as()
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
