//! A checkpoint to read, of any format.

pub(crate) mod decode_cache;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{CheckpointAudit, IndexFacts, OpenedCheckpoint};
use dcp_core::{CheckpointError, CheckpointMetadata, Key, Storage, StorageReader};
use dcp_formats::dcp::DcpReader;
use dcp_formats::hf::{HfReader, HfReaderBuilder};
use dcp_formats::torch_save::TorchSaveReader;

use crate::options::JobOptions;
use crate::source::decode_cache::DecodedOnce;

/// A checkpoint to read: the reader of its format, and the storage of its files. A view, which
/// changes other checkpoints, is a source too: see [`derived`](Self::derived).
#[derive(Clone, Debug)]
pub struct Source {
    /// The storage, for sizes, checksums and objects that are copied unchanged. Placements in the
    /// reader's metadata refer to its files.
    pub storage: Arc<dyn Storage>,
    /// The reader of the checkpoint's format.
    pub reader: Arc<dyn StorageReader>,
    /// Capabilities of the format beyond the traits, each under its type, such as the reader itself.
    extensions: Vec<Arc<dyn Any + Send + Sync>>,
    /// All keys and files, where the reader's metadata lacks tensors that are not needed.
    names: Option<Arc<CheckpointMetadata>>,
    /// The file in which one pickle holds all objects.
    single_pickle: Option<Key>,
    /// The checks of the format that the reader does not make.
    audit: Option<Arc<dyn CheckpointAudit>>,
    /// Objects and tensors of a view that a `torch.save` file stores unchanged.
    kept: Option<Arc<KeptObjects>>,
    /// Compare the bytes that pass through the reader with their checksums.
    comparisons: Vec<Arc<dyn Comparison>>,
}

/// Compares the bytes that pass through a [`Source`]'s reader with their checksums.
#[async_trait]
pub(crate) trait Comparison: fmt::Debug + Send + Sync {
    /// Reads and compares what the job has not read in full.
    ///
    /// # Errors
    ///
    /// When stored bytes are damaged, or the storage fails.
    async fn settle(&self, options: &JobOptions) -> Result<(), CheckpointError>;
}

/// Objects and tensors of a view that one `torch.save` file stores unchanged.
#[derive(Clone, Debug)]
pub(crate) struct KeptObjects {
    /// The reader of the file.
    pub(crate) reader: Arc<TorchSaveReader>,
    /// The FQN in the file, by the FQN in the view.
    pub(crate) names: HashMap<Arc<str>, Arc<str>>,
}

/// Takes the [`Source`] that the format provides as an extension, or else wraps its reader.
impl From<OpenedCheckpoint> for Source {
    fn from(opened: OpenedCheckpoint) -> Self {
        if let Some(source) = opened.extension::<Self>() {
            return (*source).clone();
        }
        let extensions = opened.extensions().to_vec();
        let (names, single_pickle, audit) = (opened.names, opened.single_pickle, opened.audit);
        Self { names, single_pickle, audit, extensions, ..Self::new(opened.storage, opened.reader) }
    }
}

impl Source {
    /// A checkpoint with its files in `storage`, read by `reader`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, reader: Arc<dyn StorageReader>) -> Self {
        Self {
            storage,
            reader,
            extensions: Vec::new(),
            names: None,
            single_pickle: None,
            audit: None,
            kept: None,
            comparisons: Vec::new(),
        }
    }

    /// Like [`new`](Self::new), for a reader that jobs also use under its type.
    fn of<R>(storage: Arc<dyn Storage>, reader: Arc<R>) -> Self
    where
        R: StorageReader + CheckpointAudit,
    {
        let audit: Arc<dyn CheckpointAudit> = Arc::clone(&reader) as _;
        let extensions: Vec<Arc<dyn Any + Send + Sync>> = vec![Arc::clone(&reader) as _];
        Self { extensions, audit: Some(audit), ..Self::new(storage, reader) }
    }

    /// The extension of that type, which the format or its plug-in added to the
    /// [opened checkpoint](OpenedCheckpoint::with_extension). A view has none.
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.extensions.iter().find_map(|extension| Arc::clone(extension).downcast().ok())
    }

    /// A checkpoint in PyTorch's format. With `tolerant`, a damaged one opens and shows what is
    /// readable; otherwise its index must agree with its files.
    #[must_use]
    pub fn dcp(storage: Arc<dyn Storage>, tolerant: bool) -> Self {
        let reader = DcpReader::builder(Arc::clone(&storage))
            .tolerant(tolerant)
            .verify_parts(false)
            .compare_saved(true)
            .build();
        Self::of(storage, Arc::new(reader))
    }

    /// Like [`dcp`](Self::dcp), from the view of one rank where ranks saved different state without
    /// collectives.
    #[must_use]
    pub fn dcp_of_rank(storage: Arc<dyn Storage>, tolerant: bool, rank: u32) -> Self {
        let reader = DcpReader::builder(Arc::clone(&storage))
            .tolerant(tolerant)
            .verify_parts(false)
            .compare_saved(true)
            .rank(rank);
        Self::of(storage, Arc::new(reader.build()))
    }

    /// One safetensors file.
    #[must_use]
    pub fn safetensors(storage: Arc<dyn Storage>, key: Key) -> Self {
        Self::hf_with(storage, |reader| reader.file(key))
    }

    /// A folder of safetensors files, as Hugging Face and PyTorch's `HuggingFaceStorageWriter`
    /// write it. With `tolerant`, a damaged one opens and shows what is readable.
    #[must_use]
    pub fn hf(storage: Arc<dyn Storage>, tolerant: bool) -> Self {
        Self::hf_with(storage, |reader| reader.tolerant(tolerant))
    }

    /// Like [`hf`](Self::hf), for another folder, another index, or other options of the reader.
    #[must_use]
    pub fn hf_with(
        storage: Arc<dyn Storage>,
        options: impl FnOnce(HfReaderBuilder) -> HfReaderBuilder,
    ) -> Self {
        let reader = Arc::new(options(HfReader::builder(Arc::clone(&storage))).build());
        Self::of(storage, reader)
    }

    /// One file of `torch.save`.
    #[must_use]
    pub fn torch_save(storage: Arc<dyn Storage>, key: Key) -> Self {
        let reader = Arc::new(TorchSaveReader::new(Arc::clone(&storage), key.clone()));
        Self { single_pickle: Some(key), ..Self::of(storage, reader) }
    }

    /// This source, read through `reader`, which makes `comparisons`.
    pub(crate) fn comparing(
        &self,
        reader: Arc<dyn StorageReader>,
        comparisons: Vec<Arc<dyn Comparison>>,
    ) -> Self {
        Self { reader, comparisons, ..self.clone() }
    }

    /// The comparisons of the reader's bytes with their checksums. Empty until a job reads the
    /// source.
    pub(crate) fn comparisons(&self) -> &[Arc<dyn Comparison>] {
        &self.comparisons
    }

    /// The reader for a job that runs `parallelism` reads and compares checksums itself.
    pub(crate) fn decoded_once(&self, parallelism: usize) -> Arc<dyn StorageReader> {
        Arc::new(DecodedOnce::new(Arc::clone(&self.reader), parallelism))
    }

    /// The same, with the checks of its format that the reader does not make.
    #[must_use]
    pub fn with_audit(mut self, audit: Arc<dyn CheckpointAudit>) -> Self {
        self.audit = Some(audit);
        self
    }

    /// The file in which one pickle holds all objects; see [`OpenedCheckpoint::single_pickle`].
    pub(crate) fn single_pickle(&self) -> Option<&Key> {
        self.single_pickle.as_ref()
    }

    /// The facts of its index besides tensors and objects; a view has none of them.
    pub(crate) async fn index_facts(&self) -> Result<IndexFacts, CheckpointError> {
        match &self.audit {
            Some(audit) => audit.index_facts().await,
            None => Ok(IndexFacts::default()),
        }
    }

    /// The checks of its format that the reader does not make; a view has none.
    #[must_use]
    pub fn audit(&self) -> Option<&Arc<dyn CheckpointAudit>> {
        self.audit.as_ref()
    }

    /// This view, with the objects that a `torch.save` file stores unchanged.
    pub(crate) fn keeping(mut self, kept: Option<Arc<KeptObjects>>) -> Self {
        self.kept = kept;
        self
    }

    /// The objects that a `torch.save` file stores unchanged.
    pub(crate) fn kept(&self) -> Option<&Arc<KeptObjects>> {
        self.kept.as_ref()
    }

    /// Whether it was opened without some tensors; see [`names`](Self::names).
    #[must_use]
    pub fn lacks_tensors(&self) -> bool {
        self.names.is_some()
    }

    /// All keys and files of the checkpoint, also those of tensors that it was opened without and
    /// that its [`metadata`](Self::metadata) lacks. Tensors may be without chunks.
    ///
    /// # Errors
    ///
    /// As [`metadata`](Self::metadata).
    pub async fn names(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        match &self.names {
            Some(names) => Ok(Arc::clone(names)),
            None => self.metadata().await,
        }
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
