//! Deletes one checkpoint of a run: makes it invisible, then removes its files.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dcp_core::error::error_chain;
use dcp_core::format::{FormatRegistry, Listing, ListingEntry, Place};
use dcp_core::storage::{Claim, FolderEntry, LeftoverAction, ObjectMeta, StorageExt as _};
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt as _, TryStreamExt as _};

use crate::place::held_target::{CLAIMED, has_locks};
use crate::run::index_files::{classify, removal_order, split_indices};

use super::model_left::model_left;
use super::protect::{examine_files, worth_keeping};
use super::retention::duration_text;
use super::sidecar::{DELETING, Mark, PIN, mark_deleting};

/// Files of one request.
const BATCH: usize = 1000;
/// Folders in a checkpoint that are claimed, besides its own; each claim keeps a file open.
const CLAIMS_MAX: usize = 64;

/// The reason that a folder is deleted, which decides what is looked at before.
#[derive(Clone, Copy, Debug)]
pub(super) enum Doomed {
    /// A complete checkpoint.
    Complete,
    /// A checkpoint whose deletion did not end.
    Deleting,
    /// The rest of a save, whose last file is at least so old.
    Incomplete { min_age: Duration, now: SystemTime },
}

/// The result for the folder.
#[derive(Debug)]
pub(super) enum Outcome {
    Deleted {
        /// The reason that a folder without the checkpoint's files is still there.
        folder_stays: Option<String>,
    },
    /// It stays, for this reason.
    Kept(String),
}

/// Files that a deletion has removed, also where it failed then.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gone {
    pub(super) files: u64,
    pub(super) bytes: u64,
}

impl Gone {
    fn of(files: &[ObjectMeta]) -> Self {
        let bytes = files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.byte_len));
        Self { files: files.len() as u64, bytes }
    }
}

/// Removes the lock files and temporary files of killed savers and deletions in a folder, where the storage has
/// claims.
async fn remove_leftovers(storage: &dyn Storage, folder: &Key) -> Result<(), StorageError> {
    if !has_locks(storage) {
        return Ok(());
    }
    let remove = LeftoverAction::Remove;
    match storage.leftovers(Some(folder), Duration::ZERO, remove).await {
        // What is left then keeps the folder, and nothing else.
        Err(error)
            if !matches!(
                error.kind(),
                StorageErrorKind::Unsupported | StorageErrorKind::Denied
            ) =>
        {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// The run that a folder is deleted from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deletion<'a> {
    pub(super) storage: &'a Arc<dyn Storage>,
    pub(super) formats: &'a FormatRegistry,
}

impl Deletion<'_> {
    /// Returns why the folder `name` is not deleted, as it is now; `None` where [`run`](Self::run) deletes it,
    /// unless a saver holds it.
    pub(super) async fn objection(
        &self,
        name: &str,
        why: Doomed,
    ) -> Result<Option<String>, StorageError> {
        let files = self.files(name).await?;
        self.objection_to(name, &files, why).await
    }

    async fn files(&self, name: &str) -> Result<Vec<ObjectMeta>, StorageError> {
        let listed = self.storage.list(Some(&Key::new(name)?));
        listed.take(Listing::OBJECTS_MAX + 1).try_collect().await
    }

    /// As [`delete`](Self::delete); what another process has deleted by then is deleted.
    pub(super) async fn run(
        &self,
        name: &str,
        why: Doomed,
        gone: &mut Gone,
    ) -> Result<Outcome, StorageError> {
        let error = match self.delete(name, why, gone).await {
            Err(error) if error.kind() == StorageErrorKind::NotFound => error,
            outcome => return outcome,
        };
        match self.files(name).await {
            Ok(files) if files.is_empty() => Ok(self.remove_folder(&Key::new(name)?).await),
            Ok(_) => Ok(Outcome::Kept("another process removes files of it".to_owned())),
            Err(_) => Err(error),
        }
    }

    /// Deletes the folder `name`: marks it, removes the files that make it visible, the last written
    /// first, then all others, then the mark. Stopped anywhere, the folder is the whole checkpoint,
    /// or an incomplete one that the next call removes.
    async fn delete(
        &self,
        name: &str,
        why: Doomed,
        gone: &mut Gone,
    ) -> Result<Outcome, StorageError> {
        let files = self.files(name).await?;
        if let Some(reason) = self.objection_to(name, &files, why).await? {
            return Ok(Outcome::Kept(reason));
        }
        let all = Gone::of(&files);
        let outcome = self.remove(name, why, files.clone()).await;
        *gone = match &outcome {
            Ok(Outcome::Deleted { .. }) => all,
            Ok(Outcome::Kept(_)) => Gone::default(),
            Err(_) => {
                let left = self.files(name).await.unwrap_or_else(|_| files.clone());
                let left: BTreeSet<_> = left.into_iter().map(|file| file.key).collect();
                let removed = files.into_iter().filter(|file| !left.contains(&file.key));
                Gone::of(&removed.collect::<Vec<_>>())
            }
        };
        outcome
    }

    async fn remove(
        &self,
        name: &str,
        why: Doomed,
        files: Vec<ObjectMeta>,
    ) -> Result<Outcome, StorageError> {
        let (storage, folder) = (&**self.storage, Key::new(name)?);
        if files.is_empty() {
            return Ok(self.remove_folder(&folder).await);
        }
        let held = match self.claims(name, &files).await {
            Ok(held) => held,
            Err(error) if error.kind() == StorageErrorKind::Conflict => {
                return Ok(Outcome::Kept(format!("a save has it: {error}")));
            }
            Err(error) => return Err(error),
        };
        let mark = folder.join(DELETING)?;
        // Another mark would hide that something was written since the first one.
        if !matches!(why, Doomed::Deleting) {
            let format =
                classify(self.formats, name, &files).map_or("", |found| found.format.info().name);
            mark_deleting(storage, &folder, &Mark::new(format, &files)).await?;
        }
        for index in self.index_order(name, &files).unwrap_or_default() {
            storage.delete(&[index]).await?;
        }
        let (data, indices) = split_indices(self.formats, files);
        let data = data.into_iter().chain(indices).map(|file| file.key);
        let data: Vec<Key> = data.filter(|key| *key != mark).collect();
        for batch in data.chunks(BATCH) {
            storage.delete(batch).await?;
        }
        // The claims keep savers out, so that what is left is of dead ones. The mark is removed after the locks: the
        // next deletion finishes one that is killed here.
        remove_leftovers(storage, &folder).await?;
        drop(held);
        storage.delete(&[mark]).await?;
        Ok(self.remove_folder(&folder).await)
    }

    /// Removes the folder, which has no files any more.
    async fn remove_folder(&self, folder: &Key) -> Outcome {
        let removed = async {
            self.storage.remove_empty_folders(folder).await?;
            if self.storage.capabilities().complete_listing {
                return Ok::<_, StorageError>(false);
            }
            let entries: Vec<_> = self.storage.list_folder(None).try_collect().await?;
            Ok(entries.contains(&FolderEntry::Folder(folder.clone())))
        };
        let folder_stays = match removed.await {
            Ok(false) => None,
            Ok(true) => Some("it holds links, or what is no regular file".to_owned()),
            Err(error) => Some(error_chain(&error)),
        };
        Outcome::Deleted { folder_stays }
    }

    /// Returns why the folder stays, with these files.
    ///
    /// What is deleted as the rest of a save shows a save that did not finish, and no reader finds a whole checkpoint in
    /// it. Files of the user may have any name, so that names decide nothing: the index of the format does, or that of
    /// another format which the folder has ([`examine_match`](crate::listing::examine_match)), then weights and
    /// folders inside ([`worth_keeping`]).
    async fn objection_to(
        &self,
        name: &str,
        files: &[ObjectMeta],
        why: Doomed,
    ) -> Result<Option<String>, StorageError> {
        if files.len() > Listing::OBJECTS_MAX {
            let most = Listing::OBJECTS_MAX;
            return Ok(Some(format!("it has more than {most} files")));
        }
        let listing = Listing::new(files.iter().cloned());
        let root = listing.root();
        let Some(folder) = root.folder(name) else { return Ok(None) };
        if files.iter().any(|file| file.key.file_name() == PIN) {
            return Ok(Some("it is pinned".to_owned()));
        }
        let mut whole = self.formats.classify(&folder);
        let mut opens = None;
        if whole.is_some() {
            let found = examine_files(self.storage, self.formats, name, files).await?;
            if !found.is_complete() {
                whole = None;
                opens = found.problem.filter(|_| found.opens);
            }
        }
        Ok(match (why, whole) {
            (Doomed::Complete, None) => Some("it is no longer complete".to_owned()),
            (Doomed::Complete, Some(found)) => match self.index_order(name, files) {
                Some(_) => None,
                None => Some(format!(
                    "half deleted, this checkpoint ({}) would seem complete: it has no index that \
                     is removed first; remove the folder with the tools of the storage",
                    found.format.info().title
                )),
            },
            (Doomed::Deleting, whole) => match folder.file(DELETING) {
                None => Some("nothing shows that its deletion began".to_owned()),
                Some(meta) => {
                    let Some(mark) = Mark::read(&**self.storage, meta).await? else {
                        return Ok(Some(format!("its {DELETING} is no mark of a deletion")));
                    };
                    match whole {
                        Some(found) if mark.spares(found.format.info().name) => {
                            Some("it is complete".to_owned())
                        }
                        _ if files.iter().any(|file| mark.is_older_than(file)) => {
                            Some("a save has written into it since its deletion began".to_owned())
                        }
                        _ => None,
                    }
                }
            },
            // Whoever resumes from an earlier checkpoint sets the tracker back: it is no reason to delete a whole one.
            (Doomed::Incomplete { .. }, Some(_)) if self.is_unfinished(name, files).await? => {
                Some("it is whole, and the tracker of the run is at an earlier one".to_owned())
            }
            (Doomed::Incomplete { .. }, Some(_)) => Some("it is complete by now".to_owned()),
            (Doomed::Incomplete { .. }, None) if opens.is_some() => {
                let problem = opens.unwrap_or_default();
                Some(format!("all that its index names is whole: {problem}"))
            }
            (Doomed::Incomplete { min_age, now }, _) => {
                let age = folder.modified().and_then(|last| now.duration_since(last).ok());
                let is_old = age.is_some_and(|age| age >= min_age);
                let min = duration_text(min_age);
                if !is_old {
                    return Ok(Some(format!("a file of it is younger than {min}")));
                }
                match worth_keeping(self.storage, self.formats, name, files).await? {
                    None if !self.is_unfinished(name, files).await? => {
                        model_left(self.storage, self.formats, name, files).await?
                    }
                    reason => reason,
                }
            }
        })
    }

    /// Whether the tracker of the run is at an earlier checkpoint, so that the save of this one may not have
    /// finished.
    async fn is_unfinished(&self, name: &str, files: &[ObjectMeta]) -> Result<bool, StorageError> {
        let mut all: Vec<_> = self.storage.list_files(None).try_collect().await?;
        all.extend_from_slice(files);
        let run = Place::folder(self.storage, Listing::new(all));
        for format in self.formats.formats() {
            if let Some(tracker) = format.tracker(&run).await? {
                return Ok(tracker.unfinished.iter().any(|(folder, _)| folder == name));
            }
        }
        Ok(false)
    }

    /// The files that make the checkpoint visible, in an order of which the first removal makes it
    /// incomplete, and no later one complete again, for every format. `None` where there is no such
    /// order, as for a format without an index.
    fn index_order(&self, name: &str, files: &[ObjectMeta]) -> Option<Vec<Key>> {
        let order = removal_order(self.formats, name, files)?;
        Some(order.into_iter().map(|file| file.key).collect())
    }

    /// The claims that savers take, where these are locks: a second claim fails while one is held.
    async fn claims(
        &self,
        name: &str,
        files: &[ObjectMeta],
    ) -> Result<Vec<Arc<dyn Claim>>, StorageError> {
        if !has_locks(&**self.storage) {
            return Ok(Vec::new());
        }
        let listing = Listing::new(files.iter().cloned());
        let root = listing.root();
        let Some(folder) = root.folder(name) else { return Ok(Vec::new()) };
        let formats = self.formats.formats().iter();
        let formats = formats.filter(|format| format.recognize(&folder).is_some());
        let landmarks = formats.flat_map(|format| format.info().landmarks);
        let mut names: BTreeSet<_> = landmarks.map(|name| (*name).to_owned()).collect();
        // A save that has no landmark yet, whatever its format, holds this one.
        let inner = folder.entries().filter_map(|entry| match entry {
            ListingEntry::Folder(inner) => Some(format!("{}/{CLAIMED}", inner.name())),
            _ => None,
        });
        names.extend(inner.take(CLAIMS_MAX));
        names.insert(CLAIMED.to_owned());
        let mut held = Vec::new();
        for landmark in names {
            let is_there =
                landmark.rsplit_once('/').is_none_or(|(parent, _)| folder.folder(parent).is_some());
            if let (true, Some(key)) = (is_there, folder.key(&landmark)) {
                held.push(self.storage.claim(&key).await?);
            }
        }
        Ok(held)
    }
}
