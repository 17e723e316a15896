//! Deletes one checkpoint of a run: makes it invisible, then removes its files.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use dcp_core::format::{FormatRegistry, Listing};
use dcp_core::storage::{Claim, ObjectMeta};
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use futures_util::TryStreamExt;

use super::retention::duration_text;
use super::sidecar::{DELETING, Mark, PIN, mark_deleting};
use crate::index_files::{classify, is_whole, removal_order, split_indices};

/// Files of one request.
const BATCH: usize = 1000;

/// Why a folder is deleted, which decides what is looked at before.
#[derive(Clone, Copy, Debug)]
pub(super) enum Doomed {
    /// A complete checkpoint.
    Complete,
    /// A checkpoint whose deletion did not end.
    Deleting,
    /// The rest of a save, whose last file is at least so old.
    Incomplete { min_age: Duration, now: SystemTime },
}

/// What became of the folder.
#[derive(Debug)]
pub(super) enum Outcome {
    Deleted {
        files: u64,
        bytes: u64,
    },
    /// It stays, for this reason.
    Kept(String),
}

/// The run that a folder is deleted from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deletion<'a> {
    pub(super) storage: &'a Arc<dyn Storage>,
    pub(super) formats: &'a FormatRegistry,
}

impl Deletion<'_> {
    /// Deletes the folder `name`: marks it, removes the files that make it visible, the last written
    /// first, then all others, then the mark. Stopped anywhere, the folder is the whole checkpoint,
    /// or an incomplete one that the next call removes.
    pub(super) async fn run(&self, name: &str, why: Doomed) -> Result<Outcome, StorageError> {
        let storage = &**self.storage;
        let folder = Key::new(name)?;
        let mut files = Vec::new();
        let mut listed = storage.list(Some(&folder));
        while let Some(meta) = listed.try_next().await? {
            if files.len() >= Listing::OBJECTS_MAX {
                let most = Listing::OBJECTS_MAX;
                return Ok(Outcome::Kept(format!("it has more than {most} files")));
            }
            files.push(meta);
        }
        drop(listed);
        if files.is_empty() {
            storage.remove_empty_folders(&folder).await?;
            return Ok(Outcome::Deleted { files: 0, bytes: 0 });
        }
        if let Some(reason) = self.objection(name, &files, why).await? {
            return Ok(Outcome::Kept(reason));
        }
        let count = files.len() as u64;
        let bytes = files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.byte_len));
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
        storage.delete(&[mark]).await?;
        drop(held);
        storage.remove_empty_folders(&folder).await?;
        Ok(Outcome::Deleted { files: count, bytes })
    }

    /// Why the folder stays, as its files are now.
    async fn objection(
        &self,
        name: &str,
        files: &[ObjectMeta],
        why: Doomed,
    ) -> Result<Option<String>, StorageError> {
        let listing = Listing::new(files.iter().cloned());
        let root = listing.root();
        let Some(folder) = root.folder(name) else { return Ok(None) };
        if folder.has(PIN) {
            return Ok(Some("it is pinned".to_owned()));
        }
        let whole = self.formats.classify(&folder).filter(is_whole);
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
                    let mark = Mark::read(&**self.storage, meta).await?;
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
            (Doomed::Incomplete { .. }, Some(_)) => Some("it is complete by now".to_owned()),
            (Doomed::Incomplete { min_age, now }, None) => {
                let age = folder.modified().and_then(|last| now.duration_since(last).ok());
                let is_old = age.is_some_and(|age| age >= min_age);
                let min = duration_text(min_age);
                (!is_old).then(|| format!("a file of it is younger than {min}"))
            }
        })
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
        let capabilities = self.storage.capabilities();
        if !capabilities.claims || capabilities.conditional_put {
            return Ok(Vec::new());
        }
        let listing = Listing::new(files.iter().cloned());
        let root = listing.root();
        let Some(folder) = root.folder(name) else { return Ok(Vec::new()) };
        let formats = self.formats.formats().iter();
        let formats = formats.filter(|format| format.recognize(&folder).is_some());
        let names: BTreeSet<_> = formats.flat_map(|format| format.info().landmarks).collect();
        let mut held = Vec::new();
        for landmark in names {
            let is_there =
                landmark.rsplit_once('/').is_none_or(|(parent, _)| folder.folder(parent).is_some());
            if let (true, Some(key)) = (is_there, folder.key(landmark)) {
                held.push(self.storage.claim(&key).await?);
            }
        }
        Ok(held)
    }
}
