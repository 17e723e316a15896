//! Copying checkpoints between storages, file by file.

mod check;
mod copy_files;
mod extra;
mod local_source;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dcp_core::registry::Access;
use dcp_core::storage::{Claim, LeftoverAction, ObjectMeta};
use dcp_core::text::without_secrets;
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use futures_util::TryStreamExt;

use crate::checkpoint::format::Shape;
use crate::checkpoint::open::cannot_open;
use crate::checkpoint::opener::Opener;
use crate::checkpoint::overlap_guard::keep_urls_apart;
use crate::checkpoint::text::count;
use crate::checkpoint::uri::{below, local_path};
use crate::error::{Error, ErrorKind};
use crate::listing::RunEntry;
use crate::options::JobOptions;
use crate::place::absent_storage::AbsentStorage;
use crate::place::held_target::{CLAIMED, has_locks, not_claimed};
use crate::place::same_place::{SharedTarget, Work, is_token, same_files};
use crate::rollback::Rollback;
use crate::run::index_files::{removal_order, split_indices};
use crate::source::Source;

pub use copy_files::{Comparing, CopyFiles, CopyReport};

/// Incomplete checkpoints of a run that are noted one by one.
const NOTES_MAX: usize = 8;
/// The most checkpoints of a run that are claimed at once; each claim keeps two files open.
const CLAIMS_MAX: usize = 128;

impl Opener {
    /// Copies the files of a checkpoint or of a whole run, unchanged, to another folder: any format,
    /// from any storage to any other.
    ///
    /// ```no_run
    /// # async fn example(opener: dcp_jobs::Opener) -> Result<(), dcp_jobs::Error> {
    /// let report = opener.copy("runs/llama/step1000", "s3://models/llama/step1000").run().await?;
    /// println!("{} files copied, {} were there", report.copied_files, report.kept_files);
    /// # Ok(())
    /// # }
    /// ```
    pub fn copy(&self, source: impl Into<String>, target: impl Into<String>) -> Copying<'_> {
        Copying {
            opener: self,
            source: source.into(),
            target: target.into(),
            compare: Comparing::default(),
            job: JobOptions::default(),
        }
    }
}

/// A copy to [`run`](Self::run), from [`Opener::copy`].
///
/// The files that make a checkpoint visible, such as `.metadata`, are copied when all others are
/// complete, so an interrupted copy is no checkpoint. Another run of it continues: files that are at
/// the target with the same bytes stay.
#[must_use = "a copy does nothing before `run`"]
pub struct Copying<'a> {
    opener: &'a Opener,
    source: String,
    target: String,
    compare: Comparing,
    job: JobOptions,
}

impl fmt::Debug for Copying<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copying")
            .field("source", &without_secrets(&self.source))
            .field("target", &without_secrets(&self.target))
            .field("compare", &self.compare)
            .finish_non_exhaustive()
    }
}

impl Copying<'_> {
    /// Sets how the copy is compared with its source; by bytes by default.
    pub fn compare(mut self, compare: Comparing) -> Self {
        self.compare = compare;
        self
    }

    /// Sets how the job uses the machine: memory, files in flight, progress, dry run.
    pub fn job(mut self, options: JobOptions) -> Self {
        self.job = options;
        self
    }

    /// Copies the files.
    ///
    /// # Errors
    ///
    /// [`NotFound`](ErrorKind::NotFound) for a source without files;
    /// [`SameTarget`](ErrorKind::SameTarget) and [`Overlap`](ErrorKind::Overlap);
    /// [`OtherCheckpoint`](ErrorKind::OtherCheckpoint) when the target has other files than steps of
    /// the same run, or complete checkpoints of which files differ; those of the storages.
    pub async fn run(self) -> Result<CopyReport, Error> {
        let Self { opener, source, target, compare, job } = self;
        keep_urls_apart(opener.storages(), &source, &target)?;
        let from = opener.storages().open(&source, Access::Read).await;
        let from = from.map_err(|error| match local_path(&source) {
            Some(path) if path.exists() => cannot_open(&source, error),
            _ => Error::from(error).context(format!("cannot read {source:?}")),
        })?;
        let files = match from.capabilities().listable {
            true => listed(&*from, &source).await?,
            false => indexed(opener, &source, &from).await?,
        };
        let (mut permissions, mut modes) = (BTreeMap::new(), BTreeMap::new());
        if let Some(path) = local_path(&source).filter(|path| path.is_dir()) {
            let names: BTreeSet<&str> = files.iter().map(|file| file.key.as_str()).collect();
            let is_listed = |key: &Key| names.contains(key.as_str());
            let has_below = |folder: &str| {
                let prefix = format!("{folder}/");
                names.range(&*prefix..).next().is_some_and(|name| name.starts_with(&prefix))
            };
            let found = local_source::look(path, &is_listed, &has_below)?;
            (permissions, modes) = (found.permissions, found.folders);
            for left in found.left {
                opener.notes().say(format!("not copying what is no file of its own: {left}"));
            }
        }
        match local_path(&target) {
            None => permissions.clear(),
            // The permissions of a folder that was there are not the copy's.
            Some(root) if root.exists() => drop(modes.remove("")),
            Some(_) => {}
        }
        if files.is_empty() {
            return Err(Error::new(ErrorKind::NotFound, format!("{source:?} has no files"))
                .with_hint("name the folder of a checkpoint or of a run"));
        }
        let work = Work::new("copy", &job).option("`Copying::compare`", &compare);
        same_files(&job, work, &source, &files).await?;
        let rollback = Rollback::new();
        let (shared, folders) =
            SharedTarget::begin(&job, Shape::Folder, &target, &rollback).await?;
        let to = target_storage(opener, &target, job.dry_run).await?;
        let is_writer = job.is_coordinator() && !job.dry_run;
        let held = if is_writer { claims(opener, &target, &to, &files).await? } else { Vec::new() };
        if is_writer {
            remove_leftovers(&*to).await?;
        }
        shared.agree(&target, &to).await?;
        let existing = listed(&*to, &target).await?.into_iter();
        let existing = existing.filter(|file| !is_token(&file.key));
        let existing: BTreeMap<_, _> = existing.map(|file| (file.key.clone(), file)).collect();
        let names: BTreeSet<_> = files.iter().map(|file| &file.key).collect();
        let gone = extra::gone_at_source(&target, &names, &existing.keys().collect())?;
        if !gone.is_empty() {
            let names =
                extra::listed(gone.iter().map(String::as_str).collect::<Vec<_>>().into_iter());
            opener.notes().say(format!(
                "{target:?} has {} that the source has no more, which {}: {names}",
                count(gone.len(), "checkpoint"),
                if gone.len() == 1 { "stays" } else { "stay" },
            ));
        }
        let trackers = trackers(opener, &source, &from).await?;
        let batches = batches(opener, files);
        let complete = complete(&batches, &existing, &trackers);
        let checkpoints = checkpoint_folders(&batches, &trackers);
        let visible = batches.iter().skip(1).flatten().map(|file| file.key.clone());
        let made_visible: Vec<Key> = visible.filter(|key| !existing.contains_key(key)).collect();
        let copy = CopyFiles {
            source: &*from,
            target: &*to,
            batches,
            existing,
            compare,
            complete,
            permissions,
        };
        let copied = copy.run(&job).await.map_err(|error| match Error::from(error) {
            error if error.kind() == ErrorKind::TargetExists => {
                Error::new(ErrorKind::OtherCheckpoint, error.to_string())
                    .with_hint("choose another folder, or remove that one")
            }
            error => error.with_hint("run the same command again to continue the copy"),
        });
        if copied.is_ok() && !job.dry_run {
            folders.keep();
        }
        let copied = copied?;
        if let (Some(root), true) = (local_path(&target), is_writer) {
            local_source::restrict(root, &modes)?;
        }
        let checked = check::check(opener, &target, checkpoints, compare, &job).await;
        if let (Err(wrong), true) = (&checked, is_writer) {
            let hides = |key: &&Key| {
                let folder = key.as_str().rsplit_once('/').map_or("", |(folder, _)| folder);
                wrong.folders.contains(folder) || trackers.contains(*key)
            };
            let hidden: Vec<Key> = match wrong.folders.is_empty() {
                true => Vec::new(),
                false => made_visible.iter().filter(hides).cloned().collect(),
            };
            // The caller has to know of the damage above all.
            if let Err(error) = to.delete(&hidden).await {
                opener.notes().say(format!(
                    "the copy is damaged and still looks complete, because what makes it visible \
                     cannot be removed: {error}"
                ));
            }
        }
        drop(held);
        checked.map_err(|wrong| wrong.error)?;
        if job.is_coordinator() && from.capabilities().listable {
            note_incomplete(opener, &source).await;
        }
        Ok(copied)
    }
}

/// Notes the checkpoints at the source of which `ls` says that they are not whole, or may not be: their copies are so,
/// too.
async fn note_incomplete(opener: &Opener, source: &str) {
    // The files are copied; whether the source can be examined by now does not matter.
    let Ok(listing) = opener.list(source).await else { return };
    let is_known = |entry: &&RunEntry| match entry.complete {
        Some(complete) => !complete,
        None => entry.checkpoint.is_some(),
    };
    let all = listing.entries.iter().filter(is_known);
    let all: Vec<_> = all.filter_map(|entry| Some((entry, entry.problem.as_ref()?))).collect();
    for (entry, problem) in all.iter().take(NOTES_MAX) {
        let uri = if entry.name == "." { source.to_owned() } else { below(source, &entry.name) };
        let verb = if entry.complete.is_some() { "is" } else { "may be" };
        opener.notes().say(format!("{uri:?} {verb} incomplete, and so {verb} its copy: {problem}"));
    }
    if let Some(more @ 1..) = all.len().checked_sub(NOTES_MAX) {
        let more = count(more, "more checkpoint");
        opener
            .notes()
            .say(format!("{more} at {source:?} may be incomplete; `Opener::list` lists them"));
    }
}

/// The folders of checkpoints, as the files that make them visible show.
fn checkpoint_folders(batches: &[Vec<ObjectMeta>], trackers: &BTreeSet<Key>) -> BTreeSet<String> {
    let indices = batches.iter().skip(1).flatten();
    let indices = indices.filter(|file| !trackers.contains(&file.key));
    indices.map(|file| folder_of(file).to_owned()).collect()
}

/// The files of checkpoints that are visible at the target: of each, those in its folder and below that
/// are of no checkpoint further in.
fn complete(
    batches: &[Vec<ObjectMeta>],
    existing: &BTreeMap<Key, ObjectMeta>,
    trackers: &BTreeSet<Key>,
) -> BTreeSet<Key> {
    let all = checkpoint_folders(batches, trackers);
    let indices = batches.iter().skip(1).flatten();
    let visible: BTreeSet<&str> = indices
        .filter(|file| existing.contains_key(&file.key) && !trackers.contains(&file.key))
        .map(folder_of)
        .collect();
    let belongs = |file: &&ObjectMeta| {
        let mut folder = folder_of(file);
        while !all.contains(folder) && !folder.is_empty() {
            folder = folder.rsplit_once('/').map_or("", |(above, _)| above);
        }
        visible.contains(folder) && !trackers.contains(&file.key)
    };
    batches.iter().flatten().filter(belongs).map(|file| file.key.clone()).collect()
}

/// Removes the temporary files of copies that were killed. The claims of the target show that none of
/// its writers runs on another machine; without claims an age shows it.
async fn remove_leftovers(target: &dyn Storage) -> Result<(), Error> {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let min_age = if has_locks(target) { Duration::ZERO } else { DAY };
    match target.leftovers(None, min_age, LeftoverAction::Remove).await {
        // A storage that cannot list them, or lets nobody do so, loses space and no data.
        Err(error)
            if !matches!(
                error.kind(),
                StorageErrorKind::Unsupported | StorageErrorKind::Denied
            ) =>
        {
            Err(error.into())
        }
        _ => Ok(()),
    }
}

/// The claims of the target, where claims are locks: that of its folder, and those of the checkpoints
/// that are copied into it.
async fn claims(
    opener: &Opener,
    target: &str,
    to: &Arc<dyn Storage>,
    files: &[ObjectMeta],
) -> Result<Vec<Arc<dyn Claim>>, Error> {
    if !has_locks(&**to) {
        return Ok(Vec::new());
    }
    let (_, indices) = split_indices(&opener.formats, files.to_vec());
    let folders: BTreeSet<_> = indices.iter().map(folder_of).collect();
    let mut held = Vec::new();
    let mut new = Vec::new();
    // The claim of the root comes first, and keeps other copies away. Each has two open files.
    for folder in std::iter::once("").chain(folders.into_iter().filter(|name| !name.is_empty())) {
        if held.len() >= CLAIMS_MAX {
            break;
        }
        let key = match folder {
            "" => Key::new(CLAIMED).map_err(StorageError::from)?,
            folder => {
                let folder = Key::new(folder).map_err(StorageError::from)?;
                let key = folder.join(CLAIMED).map_err(StorageError::from)?;
                new.push(folder);
                key
            }
        };
        match to.claim(&key).await {
            Ok(claim) => held.push(claim),
            Err(error) => {
                drop(held);
                // Those that have something in them stay.
                for folder in new {
                    to.remove_empty_folders(&folder).await?;
                }
                return Err(not_claimed(target, error));
            }
        }
    }
    Ok(held)
}

/// The folder that a file is in; the root has no name.
fn folder_of(file: &ObjectMeta) -> &str {
    file.key.as_str().rsplit_once('/').map_or("", |(folder, _)| folder)
}

async fn target_storage(
    opener: &Opener,
    target: &str,
    dry_run: bool,
) -> Result<Arc<dyn Storage>, Error> {
    let access = if dry_run { Access::Read } else { Access::Write };
    match opener.storages().open(target, access).await {
        Ok(storage) => Ok(storage),
        Err(error) if dry_run && error.kind() == StorageErrorKind::NotFound => {
            Ok(Arc::new(AbsentStorage))
        }
        Err(error) => Err(Error::from(error).context(format!("cannot write to {target:?}"))),
    }
}

async fn listed(storage: &dyn Storage, url: &str) -> Result<Vec<ObjectMeta>, Error> {
    storage
        .list(None)
        .try_collect()
        .await
        .map_err(|error| Error::from(error).context(format!("cannot list {url:?}")))
}

/// The files of a checkpoint in a storage that cannot list, such as a web server: those that its
/// index names, and those that formats look for.
async fn indexed(
    opener: &Opener,
    source: &str,
    storage: &Arc<dyn Storage>,
) -> Result<Vec<ObjectMeta>, Error> {
    let checkpoint = opener.open(source).await?;
    if !checkpoint.is_folder {
        let message = format!("{source:?} is a file, and a directory is needed");
        return Err(Error::new(ErrorKind::InvalidPlace, message).with_hint(
            "name the folder of a checkpoint; `Checkpoint::convert` writes what one file holds",
        ));
    }
    let place = opener.look(source, storage).await?;
    let mut files: BTreeMap<_, _> =
        place.listing().objects().iter().map(|file| (file.key.clone(), file.clone())).collect();
    // The files themselves are named by the index of PyTorch, on which Megatron-Core builds.
    let metadata = match Source::dcp(Arc::clone(storage), true).metadata().await {
        Ok(metadata) => metadata,
        Err(_) => checkpoint.source().metadata().await?,
    };
    for key in metadata.files() {
        if !files.contains_key(key) {
            files.insert(key.clone(), storage.stat(key).await?);
        }
    }
    opener.notes().say(format!(
        "{source:?} cannot be listed; copying the files that the index of the checkpoint names"
    ));
    Ok(files.into_values().collect())
}

/// Files in the order of a copy: all that carry data, then those that make a checkpoint visible, in
/// the deepest folders first, so that the tracker of a run comes last. Those of one folder have an
/// order in which no part of them is a complete checkpoint, of whatever format.
fn batches(opener: &Opener, files: Vec<ObjectMeta>) -> Vec<Vec<ObjectMeta>> {
    let (data, indices) = split_indices(&opener.formats, files.clone());
    let mut batches = vec![data];
    for together in indices.chunk_by(|one, other| folder_of(one) == folder_of(other)) {
        let mut together = together.to_vec();
        // One index alone has one order.
        if let [first, _, ..] = &*together {
            let name = folder_of(first).to_owned();
            let prefix = if name.is_empty() { String::new() } else { format!("{name}/") };
            let inside = files.iter().filter(|file| file.key.as_str().starts_with(&prefix));
            let inside: Vec<_> = inside.cloned().collect();
            if let Some(mut order) = removal_order(&opener.formats, &name, &inside) {
                order.reverse();
                let rank = |file: &ObjectMeta| order.iter().position(|one| one.key == file.key);
                together.sort_by_key(rank);
            }
        }
        batches.extend(together.into_iter().map(|file| vec![file]));
    }
    batches
}

/// The files at the root of a run that name its latest checkpoint, and change with each save.
async fn trackers(
    opener: &Opener,
    source: &str,
    storage: &Arc<dyn Storage>,
) -> Result<BTreeSet<Key>, Error> {
    let place = opener.look(source, storage).await?;
    let mut trackers = BTreeSet::new();
    for format in opener.formats.formats() {
        if let Some(tracker) = format.tracker(&place).await? {
            trackers.extend(Key::new(tracker.file));
        }
    }
    Ok(trackers)
}
