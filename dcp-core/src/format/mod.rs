//! The contract of a checkpoint format: it recognizes folders and files, and opens them.
//!
//! A format author implements [`CheckpointFormat`] and registers it in a [`FormatRegistry`]; every
//! job and every command then takes checkpoints of that format. A folder is listed once
//! ([`Listing`]); formats see names, lengths and the beginnings of a few small files ([`Folder`]),
//! so that recognition is a function without I/O.

mod audit;
mod listed;
mod listing;
mod open_url;
mod opened;
mod recognized;
mod registry;
mod save_record;
mod stream_transform;
mod subfolder;
mod target;
mod wanted_keys;

use std::fmt;

use async_trait::async_trait;

use crate::error::{CheckpointError, StorageError};
use crate::plans::metadata::CheckpointMetadata;

pub use audit::{
    CheckpointAudit, ChunkChecksum, Findings, FoundKind, FoundProblem, IndexCallable, IndexFacts,
    RecordAudit, RecordLimits, StoredRecord,
};
pub use listed::ListedStorage;
pub use listing::{Folder, Listing, ListingEntry, Peek};
pub use open_url::InnerCheckpoint;
pub use opened::{OpenOptions, OpenedCheckpoint, Place, RankDifference};
pub use recognized::{
    Evidence, Examined, FormatInfo, Recognized, RunSelection, RunTracker, UnfinishedSave,
};
pub use registry::{FolderMatch, FormatRegistry, natural};
pub use save_record::{SaveFacts, SaveRecord};
pub use stream_transform::{StreamEncoder, StreamTransform, StreamTransforms};
pub use subfolder::Subfolder;
pub use target::{CheckpointTarget, Compression, Existing, Occupant, OccupantRun, WriterOptions};
pub use wanted_keys::WantedKeys;

/// A checkpoint format, as a plug-in of everything that opens checkpoints.
///
/// ```
/// use std::sync::Arc;
///
/// use async_trait::async_trait;
/// use dcp_core::format::{
///     CheckpointFormat, CheckpointTarget, Evidence, Examined, Folder, FormatInfo, FormatRegistry,
///     Occupant, OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection, RunTracker,
///     UnfinishedSave,
/// };
/// use dcp_core::{CheckpointError, CheckpointMetadata, Storage, StorageError};
///
/// /// Folders with one `weights.toy`.
/// #[derive(Debug)]
/// struct Toy;
///
/// #[async_trait]
/// impl CheckpointFormat for Toy {
///     fn info(&self) -> FormatInfo {
///         FormatInfo::new("toy", "Toy").with_landmarks(&["weights.toy"])
///     }
///
///     fn peeks(&self, _folder: &Folder<'_>) -> Vec<Peek> {
///         Vec::new()
///     }
///
///     fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
///         let found = Recognized::new(Evidence::Index, "is a toy checkpoint");
///         folder.has("weights.toy").then_some(found)
///     }
///
///     fn recognize_file(&self, name: &str, _head: &[u8]) -> bool {
///         name.ends_with(".toy")
///     }
///
///     async fn examine(&self, _place: &Place) -> Result<Examined, StorageError> {
///         Ok(Examined::default())
///     }
///
///     async fn tracker(&self, _run: &Place) -> Result<Option<RunTracker>, StorageError> {
///         Ok(None)
///     }
///
///     async fn select(&self, _run: &Place) -> Result<Option<RunSelection>, StorageError> {
///         Ok(None)
///     }
///
///     fn unfinished(
///         &self,
///         _folder: &Folder<'_>,
///         _metadata: &CheckpointMetadata,
///     ) -> Option<UnfinishedSave> {
///         None
///     }
///
///     fn owns(&self, _folder: &Folder<'_>, name: &str) -> bool {
///         name == "weights.toy"
///     }
///
///     fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
///         let found = Occupant::Checkpoint("it is a toy checkpoint".to_owned());
///         folder.has("weights.toy").then_some(found)
///     }
///
///     fn target(&self) -> Option<&dyn CheckpointTarget> {
///         None
///     }
///
///     async fn open(
///         &self,
///         place: &Place,
///         _options: &OpenOptions,
///     ) -> Result<OpenedCheckpoint, CheckpointError> {
///         # struct ToyReader;
///         # impl ToyReader {
///         #     fn new(_: &Arc<dyn Storage>) -> Result<Arc<dyn dcp_core::StorageReader>, CheckpointError> {
///         #         Err(CheckpointError::NotACheckpoint { message: "an example".to_owned() })
///         #     }
///         # }
///         let reader = ToyReader::new(place.storage())?;
///         Ok(OpenedCheckpoint::new(place.storage().clone(), reader))
///     }
/// }
///
/// let registry = FormatRegistry::empty().with(Arc::new(Toy));
/// assert!(registry.by_name("toy").is_some());
/// ```
#[async_trait]
pub trait CheckpointFormat: fmt::Debug + Send + Sync + 'static {
    /// Its names, and the names of the files that show it.
    fn info(&self) -> FormatInfo;

    /// The small files of `folder` whose first bytes [`recognize`](Self::recognize) needs. Where
    /// many folders are listed at once none are read, and `recognize` decides by names alone.
    fn peeks(&self, folder: &Folder<'_>) -> Vec<Peek>;

    /// Recognizes `folder`, if it has to do with this format: a checkpoint, the remains of one, or the
    /// folder of a run.
    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized>;

    /// Whether a file of that name, whose first bytes are `head` (up to 64), is a checkpoint of
    /// this format on its own.
    fn recognize_file(&self, name: &str, head: &[u8]) -> bool;

    /// Looks closer at a checkpoint that [`recognize`](Self::recognize) calls whole: reads what is
    /// small (an index below 1 MiB, a note) and compares it with the listing. No tensor is read.
    ///
    /// # Errors
    ///
    /// When the storage fails. What is wrong with the checkpoint is [`Examined::problem`].
    async fn examine(&self, place: &Place) -> Result<Examined, StorageError>;

    /// Reads the tracker in the folder of a run, which names the checkpoint that was saved last; `None`
    /// where formats of this kind have no tracker, or the run has none.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    async fn tracker(&self, run: &Place) -> Result<Option<RunTracker>, StorageError>;

    /// The checkpoint that is opened where the folder of a run is named; `None` where this format
    /// has no runs, or the folder is not one of them.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    async fn select(&self, run: &Place) -> Result<Option<RunSelection>, StorageError>;

    /// Finds the sign that the save of a folder did not finish, although another format, which this one
    /// builds on, opens it with this `metadata`.
    fn unfinished(
        &self,
        folder: &Folder<'_>,
        metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave>;

    /// Whether the file or folder `name` in `folder` is a part of a checkpoint of this format there,
    /// besides the files that an index names: a job never writes over it, or into it.
    fn owns(&self, folder: &Folder<'_>, name: &str) -> bool;

    /// Finds files of this format in `folder` that refuse a checkpoint of another format there.
    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant>;

    /// The writer of the format; `None` for one that is only read, or written by jobs of its own.
    fn target(&self) -> Option<&dyn CheckpointTarget>;

    /// Opens the checkpoint in a folder or file that this format recognizes.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotACheckpoint`] where there is none, and when its index is bad.
    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError>;
}
