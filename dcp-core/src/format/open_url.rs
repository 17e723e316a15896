//! From a URL to an open checkpoint, of whatever format.

use std::sync::Arc;

use super::opened::{OpenOptions, OpenedCheckpoint, Place};
use super::recognized::{Evidence, RunSelection};
use super::registry::FormatRegistry;
use crate::error::{CheckpointError, StorageError};
use crate::names::key::Key;
use crate::storages::location::{below_url, split_url};
use crate::storages::registry::{Access, StorageRegistry};
use crate::storages::storage::Storage;
use crate::text::{Quoted, without_secrets};

/// Folders that are entered below the one that a URL names: that of a step in a run, and that of the
/// model in the step. A hostile listing could go on.
const DEPTH_MAX: usize = 2;

/// The place of the checkpoint that a folder without one of its own leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InnerCheckpoint {
    /// In the folder below that its format names, such as `model_and_optim` of OLMo-core.
    Folder(String),
    /// In the folder of a run that the run selects.
    Selected(RunSelection),
    /// In several folders that belong together, such as the model and the optimizer of accelerate: the
    /// first of them.
    Part(String),
}

impl FormatRegistry {
    /// Finds the checkpoint that `place` leads to: `None` where it is in the folder itself, or
    /// nowhere.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn inner_checkpoint(
        &self,
        place: &Place,
    ) -> Result<Option<InnerCheckpoint>, StorageError> {
        let matches = self.recognize(&place.listing().root());
        if let Some(best) = matches.first().filter(|best| best.found.evidence == Evidence::Index) {
            return Ok(best.found.inner.clone().map(InnerCheckpoint::Folder));
        }
        let is_checkpoint = matches.first().is_some_and(|best| best.found.is_checkpoint());
        let selection = self.select(place).await?;
        let is_followed = |one: &RunSelection| one.tracker.is_some() || !is_checkpoint;
        if let Some(selection) = selection.filter(is_followed) {
            return Ok(Some(InnerCheckpoint::Selected(selection)));
        }
        let mut parts = matches.into_iter().filter_map(|one| one.found.inner);
        Ok(parts.next().filter(|_| !is_checkpoint).map(InnerCheckpoint::Part))
    }

    /// Opens the checkpoint at a URL: a folder, the folder of a run, which selects one of its
    /// checkpoints, or a file.
    ///
    /// The storage is listed once. [`OpenedCheckpoint::notes`] says which checkpoint of a run it is.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotACheckpoint`], which says what there is instead, when no format
    /// recognizes a checkpoint; when its index is bad; and when the storage fails.
    pub async fn open_url(
        &self,
        storages: &StorageRegistry,
        url: &str,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let storage = match storages.open(url, Access::Read).await {
            Ok(storage) => storage,
            Err(error) => {
                return match file_at(storages, url).await {
                    Some((storage, file)) => self.open_file(&storage, file, options).await,
                    None => Err(error.into()),
                };
            }
        };
        let outer = self.look(&storage).await?.with_name(split_url(url).map(|(_, name)| name));
        // An object store has no folders that could be missing.
        if outer.listing().root().is_empty()
            && let Some((storage, file)) = file_at(storages, url).await
        {
            return self.open_file(&storage, file, options).await;
        }
        let (mut place, mut at, mut notes) = (outer.clone(), url.to_owned(), Vec::new());
        for _ in 0..DEPTH_MAX {
            let folder = match self.inner_checkpoint(&place).await? {
                None => break,
                Some(InnerCheckpoint::Folder(folder)) => folder,
                Some(InnerCheckpoint::Selected(selection)) => {
                    let RunSelection { description, folder, reason, .. } = selection;
                    let folder = folder.map_err(|problem| {
                        let message = format!("no checkpoint of the run is complete: {problem}");
                        CheckpointError::NotACheckpoint { message }
                    })?;
                    notes.push(format!("the folder {description}; opening {folder}, {reason}"));
                    folder
                }
                Some(InnerCheckpoint::Part(part)) => {
                    notes.push(format!("the folder has several checkpoints; opening {part}"));
                    part
                }
            };
            at = below_url(&at, &folder);
            place = self.look_below(&place, &folder).await?;
            if place.listing().root().is_empty() {
                // A link to another place, or a storage that cannot list.
                place = self.look(&storages.open(&at, Access::Read).await?).await?;
            }
        }
        let matches = self.recognize(&place.listing().root());
        let is_here = |found: &super::Recognized| found.is_checkpoint() && found.inner.is_none();
        match matches.first().filter(|best| is_here(&best.found)) {
            Some(_) => Ok(self.open_first(&matches, &place, options).await?.with_notes(notes)),
            None => {
                let found = self.explain(&outer.listing().root());
                let message = format!("{} is {found}", Quoted(&without_secrets(url)));
                Err(CheckpointError::NotACheckpoint { message })
            }
        }
    }
}

/// The storage and key of a URL that names a file.
async fn file_at(storages: &StorageRegistry, url: &str) -> Option<(Arc<dyn Storage>, Key)> {
    let (parent, name) = split_url(url)?;
    let storage = storages.open(&parent, Access::Read).await.ok()?;
    let key = Key::new(name).ok()?;
    storage.stat(&key).await.ok()?;
    Some((storage, key))
}
