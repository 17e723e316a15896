//! Files of a model that are complete, and how they become one.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{
    CheckpointError, FormatError, Key, Payload, Storage, StorageError, StorageErrorKind,
};

use super::index_file::INDEX_NAME;
use super::layout::{HfPlan, SINGLE_NAME};
use super::replaced::Old;
use super::sidecar_files::SidecarFiles;
use super::single::{Named, SingleFile};
use super::write::{Done, HfWritten};

/// Complete files of a model that has no index yet.
#[must_use = "it is not a model until it is published"]
pub struct PendingFolder<'a> {
    pub(super) storage: &'a Arc<dyn Storage>,
    pub(super) overwrite: bool,
    pub(super) old: Old,
    pub(super) beside: SidecarFiles<'a>,
    pub(super) plan: HfPlan,
    /// Files that have their names.
    pub(super) files: Vec<Done>,
    /// A single-file model, which gets its name last.
    pub(super) single: Option<SingleFile>,
}

impl fmt::Debug for PendingFolder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingFolder").field("files", &self.files).finish_non_exhaustive()
    }
}

impl PendingFolder<'_> {
    /// The second half of [`write_folder`](super::write_folder): publishes the model in place of
    /// the old one.
    ///
    /// # Errors
    ///
    /// As [`write_folder`](super::write_folder).
    pub async fn publish(mut self) -> Result<HfWritten, CheckpointError> {
        let complete = self.files.len() + usize::from(self.single.is_some());
        let published = match self.single.take() {
            _ if complete != self.plan.files.len() => {
                let problem =
                    format!("{complete} of its {} files were written", self.plan.files.len());
                Published::No(FormatError::new("model", problem).into())
            }
            Some(single) => self.name(single).await,
            None => self.put_last().await,
        };
        let Self { storage, old, mut beside, files, .. } = self;
        let mut written = HfWritten { files, ..HfWritten::default() };
        match published {
            Published::Yes(last) => {
                let index = last.iter().map(|(key, _)| key).find(|key| key.as_str() == INDEX_NAME);
                written.index = index.cloned();
                written.files.extend(last);
            }
            Published::No(error) => {
                beside.undo().await;
                remove(&**storage, written.files.iter().map(|(key, _)| key)).await;
                return Err(error);
            }
            Published::Unsure(error) => return Err(error),
        }
        let new: BTreeSet<Key> = written.files.iter().map(|(key, _)| key.clone()).collect();
        let mut stale: Vec<&Key> = old.files.iter().filter(|key| !new.contains(*key)).collect();
        // An index is removed before the files that it names.
        stale.sort_by_key(|key| key.as_str() != INDEX_NAME);
        (written.removed, written.left) = remove(&**storage, stale.into_iter()).await;
        beside.finish().await?;
        Ok(written)
    }

    /// The files that have their names, with their sizes.
    #[must_use]
    pub fn files(&self) -> &[(Key, u64)] {
        &self.files
    }

    /// Adds the files that other processes wrote with the same choice of names.
    pub fn add(&mut self, files: impl IntoIterator<Item = (Key, u64)>) {
        self.files.extend(files);
    }

    /// Removes the files, and those of the plan that other processes may have written.
    pub async fn abort_all(self) {
        let planned: Vec<_> = self.plan.files.iter().map(|file| file.name.clone()).collect();
        let storage = self.storage;
        let is_single = self.plan.single().is_some();
        self.abort().await;
        if !is_single {
            remove(&**storage, planned.iter()).await;
        }
    }

    /// Removes the files.
    pub async fn abort(self) {
        if let Some(single) = self.single {
            single.abort().await;
        }
        remove(&**self.storage, self.files.iter().map(|(key, _)| key)).await;
    }

    /// Gives a single-file model its name.
    async fn name(&mut self, single: SingleFile) -> Published {
        if let Err(error) = self.beside.prepare().await {
            single.abort().await;
            return Published::No(error.into());
        }
        let done = single.done();
        match single.publish(&**self.storage).await {
            Named::New => Published::Yes(Some(done)),
            Named::Old(error) => Published::No(error.into()),
            Named::Unsure(error) => Published::Unsure(error.into()),
        }
    }

    /// Writes the index, and removes a single-file model, which loaders would prefer.
    async fn put_last(&mut self) -> Published {
        if let Err(error) = self.beside.prepare().await {
            return Published::No(error.into());
        }
        // Without a reference to the folder, whose upload other threads may not share.
        let json = self.plan.index_json().map(Bytes::from);
        let published = put_index(&**self.storage, json, self.overwrite).await;
        let single = self.old.files.iter().find(|key| key.as_str() == SINGLE_NAME);
        let (Published::Yes(index), Some(single)) = (&published, single) else { return published };
        let removed = self.storage.delete(std::slice::from_ref(single)).await;
        let Err(error) = removed else { return published };
        match self.storage.contains(single).await {
            Ok(false) => published,
            // Loaders prefer it, so the old model is still in place.
            Ok(true) => {
                remove(&**self.storage, index.iter().map(|(key, _)| key)).await;
                Published::No(error.into())
            }
            Err(_) => Published::Unsure(error.into()),
        }
    }
}

/// Writes the index, if there is one.
async fn put_index(storage: &dyn Storage, json: Option<Bytes>, overwrite: bool) -> Published {
    let Some(json) = json else { return Published::Yes(None) };
    let key = match Key::new(INDEX_NAME) {
        Ok(key) => key,
        Err(error) => return Published::No(StorageError::from(error).into()),
    };
    let put = |mode| storage.put(&key, Payload::from(json.clone()), mode);
    let mode = if overwrite { PutMode::Overwrite } else { PutMode::Create };
    let written = Published::Yes(Some((key.clone(), json.len() as u64)));
    let Err(error) = put(mode).await else { return written };
    match storage.read_all(&key).await {
        // The index exists; writing it again may make it durable.
        Ok(found) if found == json => match put(PutMode::Overwrite).await {
            Ok(_) => written,
            Err(_) => Published::Unsure(error.into()),
        },
        Ok(_) => Published::No(error.into()),
        Err(absent) if absent.kind() == StorageErrorKind::NotFound => Published::No(error.into()),
        Err(_) => Published::Unsure(error.into()),
    }
}

/// The result of publishing.
enum Published {
    /// The new model is published, by this file if it is a single one.
    Yes(Option<Done>),
    /// The old state remains.
    No(CheckpointError),
    /// Published but perhaps not durable; or the result is unknown.
    Unsure(CheckpointError),
}

/// Removes files. Returns those removed and those not.
pub(super) async fn remove<'a>(
    storage: &dyn Storage,
    keys: impl Iterator<Item = &'a Key>,
) -> (Vec<Key>, Vec<Key>) {
    let keys = keys.cloned().collect::<Vec<_>>();
    if storage.delete(&keys).await.is_ok() {
        return (keys, Vec::new());
    }
    let (mut removed, mut left) = (Vec::new(), Vec::new());
    for key in keys {
        match storage.delete(std::slice::from_ref(&key)).await {
            Ok(()) => removed.push(key),
            Err(error) => {
                tracing::warn!(file = %key, %error, "cannot remove a file");
                left.push(key);
            }
        }
    }
    (removed, left)
}
