//! Opening a checkpoint of any format.

pub(crate) mod examine;
pub(crate) mod formats;
pub(crate) mod list_run;
mod run_entry;
mod run_tracker;
mod unread_files;

use std::sync::Arc;

use dcp_core::format::OpenOptions;
use dcp_core::{CheckpointError, Key, Storage};

use crate::source::Source;

pub use examine::{examine_checkpoint, examine_match, examined, incomplete};
pub use formats::formats;
pub use list_run::{RunListing, list_run, list_run_without};
pub use run_entry::{EntryKind, RunEntry};
pub use unread_files::UnreadFiles;

impl Source {
    /// The checkpoint in a folder, of any of the [`formats`](formats()) of this crate. With
    /// `tolerant`, a damaged one is opened as far as it is whole.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotACheckpoint`], which says what the folder holds, when there is none;
    /// and when an index cannot be read.
    pub async fn open(storage: &Arc<dyn Storage>, tolerant: bool) -> Result<Self, CheckpointError> {
        let options = OpenOptions::default().with_tolerant(tolerant);
        Ok(formats().open(storage, &options).await?.into())
    }

    /// The checkpoint in a file, recognized by its first bytes: `torch.save`'s formats or
    /// safetensors; or in the files that a `*.safetensors.index.json` names.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotACheckpoint`] when it is neither, and when it cannot be read.
    pub async fn open_file(
        storage: &Arc<dyn Storage>,
        key: Key,
        tolerant: bool,
    ) -> Result<Self, CheckpointError> {
        let options = OpenOptions::default().with_tolerant(tolerant);
        Ok(formats().open_file(storage, key, &options).await?.into())
    }
}
