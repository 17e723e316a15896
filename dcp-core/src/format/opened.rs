//! The place of a checkpoint, the options to open it, and the opened checkpoint.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::audit::CheckpointAudit;
use super::listed::ListedStorage;
use super::listing::Listing;
use super::stream_transform::StreamTransforms;
use super::subfolder::Subfolder;
use super::wanted_keys::WantedKeys;
use crate::error::StorageError;
use crate::names::key::Key;
use crate::plans::metadata::CheckpointMetadata;
use crate::protocol::checkpoint::StorageReader;
use crate::storages::storage::Storage;

/// Options to open a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// Whether a damaged checkpoint is opened as far as it is whole. Otherwise its index must agree
    /// with its files.
    pub tolerant: bool,
    /// The variant of a model that is read, as in `model.fp16.safetensors`, where the format has
    /// variants.
    pub variant: Option<String>,
    /// The rank whose tensors and objects are read where ranks saved without collectives and
    /// differ.
    pub rank: Option<u32>,
    /// The tensors that are needed; `None` for all. A format may leave others out of the metadata,
    /// where it opens the checkpoint faster without them, but no objects. One that does returns their
    /// [`names`](OpenedCheckpoint::names).
    pub keys: Option<WantedKeys>,
    /// Whether the tensors go into the memory of a trainer, which compares no checksums itself: the
    /// reader compares those of chunks that several reads cover together. Jobs compare what they read.
    pub for_load: bool,
    /// Whether every rank of a group opens the checkpoint. Checks that cost a request for each rank
    /// are then left to [`audit`](OpenedCheckpoint::audit).
    pub in_group: bool,
    /// The transforms of stored items that are undone besides the built-in one, zstd.
    pub transforms: StreamTransforms,
}

impl OpenOptions {
    /// Sets whether a damaged checkpoint is opened as far as it is whole.
    #[must_use]
    pub fn with_tolerant(mut self, tolerant: bool) -> Self {
        self.tolerant = tolerant;
        self
    }

    /// Sets the variant of a model that is read.
    #[must_use]
    pub fn with_variant(mut self, variant: Option<String>) -> Self {
        self.variant = variant;
        self
    }

    /// Sets the rank whose tensors and objects are read where ranks differ.
    #[must_use]
    pub fn with_rank(mut self, rank: Option<u32>) -> Self {
        self.rank = rank;
        self
    }

    /// Sets whether the tensors go into the memory of a trainer.
    #[must_use]
    pub fn with_for_load(mut self, for_load: bool) -> Self {
        self.for_load = for_load;
        self
    }

    /// Sets whether every rank of a group opens the checkpoint.
    #[must_use]
    pub fn with_in_group(mut self, in_group: bool) -> Self {
        self.in_group = in_group;
        self
    }

    /// Sets the transforms of stored items that are undone.
    #[must_use]
    pub fn with_transforms(mut self, transforms: StreamTransforms) -> Self {
        self.transforms = transforms;
        self
    }

    /// Sets the tensors that are needed; `None` for all.
    #[must_use]
    pub fn with_keys(mut self, keys: Option<WantedKeys>) -> Self {
        self.keys = keys;
        self
    }
}

/// A folder or file that holds a checkpoint, with the listing of the folder.
#[derive(Clone, Debug)]
pub struct Place {
    storage: Arc<dyn Storage>,
    listing: Arc<Listing>,
    file: Option<Key>,
    /// The folder of [`known_files`](Self::known_files).
    known: Option<String>,
    /// The folder of [`with_index`](Self::with_index), and the index.
    index: Option<(String, Arc<CheckpointMetadata>)>,
}

impl Place {
    /// The folder of `storage`, which was listed.
    #[must_use]
    pub fn folder(storage: &Arc<dyn Storage>, listing: Listing) -> Self {
        let listing = Arc::new(listing);
        let storage = ListedStorage::new(Arc::clone(storage), Arc::clone(&listing));
        Self { storage: Arc::new(storage), listing, file: None, known: None, index: None }
    }

    /// The name of the folder, where it is known.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.listing.name()
    }

    /// Sets the name of the folder.
    #[must_use]
    pub fn with_name(self, name: Option<String>) -> Self {
        let listing = Arc::new(Listing::clone(&self.listing).with_name(name));
        Self { listing, ..self }
    }

    /// One file of `storage`.
    #[must_use]
    pub fn file_of(storage: &Arc<dyn Storage>, file: Key) -> Self {
        let storage = ListedStorage::unlisted(Arc::clone(storage));
        let storage = Arc::new(storage);
        Self { storage, listing: Arc::default(), file: Some(file), known: None, index: None }
    }

    /// The folder `folder` in this one.
    ///
    /// # Errors
    ///
    /// When it is no name of a folder.
    pub fn below(&self, folder: &str) -> Result<Self, StorageError> {
        if folder == "." {
            return Ok(self.clone());
        }
        let storage = Subfolder::new(Arc::clone(&self.storage), Key::new(folder)?);
        let listing = Arc::new(self.listing.below(folder));
        let inside = |path: &str| match path.strip_prefix(folder)? {
            "" => Some(".".to_owned()),
            rest => Some(rest.strip_prefix('/')?.to_owned()),
        };
        let known = self.known.as_deref().and_then(inside);
        let index = self.index.as_ref();
        let index = index.and_then(|(path, index)| Some((inside(path)?, Arc::clone(index))));
        Ok(Self { storage: Arc::new(storage), listing, file: None, known, index })
    }

    /// Marks the checkpoint in `folder` (a path from this one; `.` for itself) as one that has files
    /// of the same names and lengths as another one, which was examined and found whole.
    #[must_use]
    pub fn known_files(self, folder: impl Into<String>) -> Self {
        Self { known: Some(folder.into()), ..self }
    }

    /// Adds the index of the checkpoint in `folder` (a path from this one; `.` for itself), which was
    /// read whole already.
    #[must_use]
    pub fn with_index(self, folder: impl Into<String>, index: Arc<CheckpointMetadata>) -> Self {
        Self { index: Some((folder.into(), index)), ..self }
    }

    /// The index of the checkpoint in this folder, if it was [read already](Self::with_index).
    #[must_use]
    pub fn index(&self) -> Option<&Arc<CheckpointMetadata>> {
        self.index.as_ref().filter(|(folder, _)| folder == ".").map(|(_, index)| index)
    }

    /// Whether the files of the checkpoint in this folder need no comparison with its index; see
    /// [`known_files`](Self::known_files).
    #[must_use]
    pub fn has_known_files(&self) -> bool {
        self.known.as_deref() == Some(".")
    }

    /// Whether `file` is one of the [known files](Self::known_files).
    #[must_use]
    pub fn is_known(&self, file: &Key) -> bool {
        let Some(known) = self.known.as_deref() else { return false };
        let below = file.as_str().strip_prefix(known);
        known == "." || below.is_some_and(|rest| rest.starts_with('/'))
    }

    /// Whether there are [known files](Self::known_files) in the folder, or in one below.
    #[must_use]
    pub fn has_any_known(&self) -> bool {
        self.known.is_some()
    }

    /// The folder's files; lengths are those of the listing.
    #[must_use]
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The listing of the folder; of a single file it is empty.
    #[must_use]
    pub fn listing(&self) -> &Listing {
        &self.listing
    }

    /// The file, where the checkpoint is one file.
    #[must_use]
    pub fn file(&self) -> Option<&Key> {
        self.file.as_ref()
    }
}

/// A tensor or object of which ranks that saved without collectives stored different values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankDifference {
    /// Its name.
    pub fqn: Arc<str>,
    /// The ranks that store it, ascending.
    pub ranks: Vec<u32>,
}

impl RankDifference {
    /// This name, which these ranks store.
    #[must_use]
    pub fn new(fqn: Arc<str>, mut ranks: Vec<u32>) -> Self {
        ranks.sort_unstable();
        Self { fqn, ranks }
    }
}

/// A checkpoint that a format has opened.
#[derive(Clone)]
#[non_exhaustive]
pub struct OpenedCheckpoint {
    /// The bytes. Placements in the reader's metadata are places in it.
    pub storage: Arc<dyn Storage>,
    /// The meaning of the bytes.
    pub reader: Arc<dyn StorageReader>,
    /// All keys and files, also those that [`OpenOptions::keys`] left out of the reader's metadata, in the
    /// order of the checkpoint. Tensors may have no chunks, objects no placement. `None` where nothing
    /// was left out.
    pub names: Option<Arc<CheckpointMetadata>>,
    /// Oddities of the checkpoint that do not keep it from being read, for people.
    pub notes: Vec<String>,
    /// The checks of the format that the reader does not make.
    pub audit: Option<Arc<dyn CheckpointAudit>>,
    /// Differences among ranks that saved without collectives: [`OpenOptions::rank`] chooses one.
    pub differing: Vec<RankDifference>,
    /// Files that store the same in another form, which [`OpenOptions::variant`] chooses.
    pub variants: Vec<Key>,
    /// The file in which one pickle holds all objects: a read of one decodes all of them, and they
    /// may share memory.
    pub single_pickle: Option<Key>,
    extensions: Vec<Arc<dyn Any + Send + Sync>>,
}

impl OpenedCheckpoint {
    /// A checkpoint in `storage`, which `reader` reads.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>, reader: Arc<dyn StorageReader>) -> Self {
        Self {
            storage,
            reader,
            names: None,
            notes: Vec::new(),
            audit: None,
            differing: Vec::new(),
            variants: Vec::new(),
            single_pickle: None,
            extensions: Vec::new(),
        }
    }

    /// Sets all keys and files, where the reader's metadata lacks some.
    #[must_use]
    pub fn with_names(mut self, names: Option<Arc<CheckpointMetadata>>) -> Self {
        self.names = names;
        self
    }

    /// Adds notes.
    #[must_use]
    pub fn with_notes(mut self, notes: impl IntoIterator<Item = String>) -> Self {
        self.notes.extend(notes);
        self
    }

    /// Sets the checks of the format that the reader does not make.
    #[must_use]
    pub fn with_audit(mut self, audit: Arc<dyn CheckpointAudit>) -> Self {
        self.audit = Some(audit);
        self
    }

    /// Sets the differences among ranks.
    #[must_use]
    pub fn with_differing(mut self, differing: Vec<RankDifference>) -> Self {
        self.differing = differing;
        self
    }

    /// Sets the files of other variants.
    #[must_use]
    pub fn with_variants(mut self, variants: Vec<Key>) -> Self {
        self.variants = variants;
        self
    }

    /// Sets the file in which one pickle holds all objects.
    #[must_use]
    pub fn with_single_pickle(mut self, file: Key) -> Self {
        self.single_pickle = Some(file);
        self
    }

    /// Adds an extension for callers that know the format, such as the reader
    /// under its own type.
    #[must_use]
    pub fn with_extension<T: Any + Send + Sync>(mut self, extension: Arc<T>) -> Self {
        self.extensions.push(extension);
        self
    }

    /// The extension of that type.
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.extensions.iter().find_map(|extension| Arc::clone(extension).downcast().ok())
    }

    /// All extensions, for what presents this checkpoint in another way.
    #[must_use]
    pub fn extensions(&self) -> &[Arc<dyn Any + Send + Sync>] {
        &self.extensions
    }
}

impl fmt::Debug for OpenedCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedCheckpoint")
            .field("storage", &self.storage)
            .field("reader", &self.reader)
            .field("notes", &self.notes)
            .finish_non_exhaustive()
    }
}
