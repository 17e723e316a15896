//! The checkpoints in a directory: what each is, whether it is whole, how large, how old.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dcp_core::error::error_chain;
use dcp_core::format::{
    CheckpointFormat, Evidence, Examined, Folder, FolderMatch, FormatRegistry, Listing,
    ListingEntry, Place, RunTracker, natural,
};
use dcp_core::storage::{ObjectMeta, StorageExt};
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;

use super::examine::{examine_checkpoint, examine_match};
use super::run_entry::{EntryKind, RunEntry};
use super::run_tracker::tracker;
use super::unread_files::{UnreadFiles, mark_unread};

/// Levels of folders below those of the directory in which checkpoints are listed.
const DEPTH_MAX: usize = 2;
/// Entries of the directory that are listed one by one.
const ENTRIES_MAX: usize = 100_000;
/// Files of the directory that are opened to see whether they are checkpoints.
const OPENED_MAX: usize = 256;
/// The first bytes of a file, which show its format.
const HEAD_BYTES: u64 = 64;
/// Checkpoints, the last ones, that are examined.
const EXAMINED_MAX: usize = 64;

/// The checkpoints in a directory. Serialized, it is the output of `dcp ls --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunListing {
    /// The checkpoints, in natural order of their names; the directory itself is called `.`. One in a
    /// folder that is no checkpoint has the path to it as its name: `run/step10`.
    pub entries: Vec<RunEntry>,
    /// The name of the last whole one that is numbered, of those directly in the directory.
    pub latest: Option<String>,
    /// Files and folders that are no checkpoints.
    pub other: usize,
    /// Whether there are more files than are looked at, so that not all is known.
    pub truncated: bool,
    /// The problem of the tracker of a run of Megatron-LM, where it names no whole checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracker_problem: Option<String>,
    /// Links that are not followed and belong to none of the entries, such as a part of the step that the directory
    /// is; each with the reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub unread: BTreeMap<String, String>,
}

/// An entry, and how its checkpoint is examined.
pub(super) struct Listed {
    pub(super) entry: RunEntry,
    format: Arc<dyn CheckpointFormat>,
    /// The folder as it is recognized by its names.
    found: Option<FolderMatch>,
}

impl Listed {
    fn folder(name: &str, folder: &Folder<'_>, found: FolderMatch, truncated: bool) -> Self {
        let by_names = found.clone();
        let FolderMatch { format, found, .. } = found;
        let at = |inner: &str| match name {
            "." => inner.to_owned(),
            _ => format!("{name}/{inner}"),
        };
        let (files, modified) = (folder.file_count() as u64, folder.modified());
        let mut entry = entry(name, &*format, false, (files, folder.byte_len(), modified));
        entry.checkpoint = match (&found.inner, &found.problem) {
            (Some(inner), _) => Some(at(inner)),
            (None, None) => Some(name.to_owned()),
            _ => None,
        };
        entry.complete = Some(found.problem.is_none());
        entry.problem = found.problem;
        if found.evidence == Evidence::Loose {
            entry.complete = None;
            entry.problem = Some(format!("it {}", found.description));
            entry.checkpoint = None;
        }
        if truncated && entry.problem.is_some() {
            entry.complete = None;
            entry.problem = Some("there are too many files to have seen all of them".to_owned());
        }
        Self { entry, format, found: Some(by_names) }
    }

    fn file(name: &str, meta: &ObjectMeta, format: Arc<dyn CheckpointFormat>) -> Self {
        let mut entry = entry(name, &*format, true, (1, meta.byte_len, meta.modified));
        entry.checkpoint = Some(name.to_owned());
        Self { entry, format, found: None }
    }

    /// Whether names alone say that it is not whole.
    fn lacks_by_names(&self) -> bool {
        let lacks = self.found.as_ref().is_some_and(|one| one.found.problem.is_some());
        lacks && self.entry.complete == Some(false)
    }
}

fn entry(
    name: &str,
    format: &dyn CheckpointFormat,
    is_file: bool,
    (files, bytes, modified): (u64, u64, Option<SystemTime>),
) -> RunEntry {
    let seconds = |time: SystemTime| Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs());
    let info = format.info();
    RunEntry {
        name: name.to_owned(),
        kind: EntryKind::of(info, is_file),
        complete: Some(true),
        problem: None,
        strays: Vec::new(),
        step: last_number(name),
        ephemeral: None,
        version: None,
        files,
        bytes,
        modified: modified.and_then(seconds),
        checkpoint: None,
    }
}

/// Lists the checkpoints in the directory of `storage`, of all `formats`: the steps of a run, each
/// with whether it is whole; or those of all runs in it. The directory is listed once, with everything below it: a bucket returns
/// the names of a thousand files at a time, of whatever folders. The last 64 checkpoints are examined:
/// small indexes (below 1 MiB) are compared with the lengths of the files that they name, and notes
/// of trainers are read; no tensor is read. Of checkpoints whose files have the same names and
/// lengths, as those of a run mostly have, one index is read.
///
/// # Errors
///
/// When the storage fails.
pub async fn list_run(
    storage: &Arc<dyn Storage>,
    formats: &FormatRegistry,
) -> Result<RunListing, StorageError> {
    list_run_without(storage, formats, &UnreadFiles::new()).await
}

/// As [`list_run`], of a directory in which some files are not read. Their names count; whether a
/// checkpoint with one of them is complete is unknown, and the reason is its problem.
///
/// # Errors
///
/// When the storage fails.
pub async fn list_run_without(
    storage: &Arc<dyn Storage>,
    formats: &FormatRegistry,
    unread: &UnreadFiles,
) -> Result<RunListing, StorageError> {
    let mut listing = match Listing::read(&**storage, &[]).await {
        // Nothing is there but such files.
        Err(error) if error.kind() == StorageErrorKind::Link && !unread.is_empty() => {
            Listing::default()
        }
        listing => listing?,
    };
    let not_listed = unread.keys().filter(|key| listing.get(key).is_none());
    let not_listed: Vec<_> = not_listed.map(|key| ObjectMeta::new(key.clone(), 0)).collect();
    if !not_listed.is_empty() {
        listing = Listing::new(listing.objects().iter().cloned().chain(not_listed));
    }
    let place = Place::folder(storage, listing);
    let root = place.listing().root();
    let mut run = RunListing { truncated: place.listing().is_truncated(), ..Default::default() };
    let mut listed = Vec::new();
    let own = formats.classify(&root);
    let tracker = tracker(formats, &place, &mut run).await;
    // Stray files beside the tracker of a run are no checkpoint: readers open what the tracker names.
    let needed = if tracker.is_some() { Evidence::Remains } else { Evidence::Files };
    let own = own.filter(|own| own.found.evidence >= needed);
    let is_part = |name: &str| own.as_ref().is_some_and(|own| own.format.owns(&root, name));
    let mut files = Vec::new();
    for (seen, inside) in root.entries().enumerate() {
        if seen >= ENTRIES_MAX {
            run.truncated = true;
            break;
        }
        match inside {
            ListingEntry::File(_, meta) if unread.contains_key(&meta.key) => run.other += 1,
            ListingEntry::File(name, meta) => files.push((name, meta)),
            ListingEntry::Folder(folder) if is_part(folder.name()) => {}
            ListingEntry::Folder(folder) => {
                let found = formats.classify(&folder);
                let before = listed.len();
                if found.as_ref().is_none_or(is_loose) {
                    list_below(formats, &folder, DEPTH_MAX, run.truncated, &mut listed);
                }
                match found {
                    Some(found) if listed.len() == before => {
                        listed.push(Listed::folder(folder.name(), &folder, found, run.truncated));
                    }
                    _ => run.other += usize::from(listed.len() == before),
                }
            }
        }
    }
    match own {
        // A file of a checkpoint that is the directory itself is none of its own.
        Some(own) => listed.push(Listed::folder(".", &root, own, run.truncated)),
        None => run.other += list_files(&**storage, formats, files, &mut listed).await?,
    }
    let mark = |listed: &mut Vec<Listed>| {
        let others = mark_unread(unread, listed);
        if let Some(tracker) = &tracker {
            mark_unfinished(tracker, listed);
        }
        others
    };
    let others = mark(&mut listed);
    run.unread = others.into_iter().map(|(key, why)| (key.as_str().to_owned(), why)).collect();
    examine(formats, &place, &mut listed).await;
    // Those too that names alone call incomplete, and their indexes do not.
    mark(&mut listed);
    run.entries = listed.into_iter().map(|one| one.entry).collect();
    run.entries.sort_by_cached_key(|entry| natural(&entry.name));
    let whole = |entry: &&RunEntry| entry.is_complete();
    let is_own = |entry: &&RunEntry| entry.step.is_some() && !entry.name.contains('/');
    let steps = run.entries.iter().filter(whole).filter(is_own);
    let mut latest = steps.max_by_key(|entry| entry.step);
    if let Some(tracker) = tracker {
        let file = tracker.file;
        match &tracker.folder {
            Ok(folder) => {
                let tracked = run.entries.iter().find(|entry| entry.name == *folder);
                // A release has no number by which it could be the latest.
                if let Some(tracked) = tracked.filter(whole).filter(|one| one.step.is_none()) {
                    latest = Some(tracked);
                }
                run.tracker_problem = match tracked {
                    None => Some(format!("{file} names {folder}, which is not there")),
                    Some(entry) if entry.complete == Some(false) => {
                        Some(format!("{file} names {folder}, which is not complete"))
                    }
                    Some(_) => None,
                };
            }
            Err(problem) => run.tracker_problem = Some(format!("{file} says {problem}")),
        }
    }
    run.latest = latest.map(|entry| entry.name.clone());
    Ok(run)
}

/// Adds the checkpoints in folders below one that is none, such as the runs of a project.
fn list_below(
    formats: &FormatRegistry,
    folder: &Folder<'_>,
    depth: usize,
    truncated: bool,
    listed: &mut Vec<Listed>,
) {
    for below in folder.folders() {
        if listed.len() >= ENTRIES_MAX {
            return;
        }
        match formats.classify(&below) {
            Some(found) if !is_loose(&found) => {
                listed.push(Listed::folder(below.path(), &below, found, truncated));
            }
            _ if depth > 1 => list_below(formats, &below, depth - 1, truncated, listed),
            _ => {}
        }
    }
}

/// Whether a folder has files that are no checkpoint together: they hide none in the folders below.
fn is_loose(found: &FolderMatch) -> bool {
    found.found.evidence == Evidence::Loose
}

/// Marks the checkpoints that the run has saved after the one that its tracker names.
fn mark_unfinished(tracker: &RunTracker, listed: &mut [Listed]) {
    let unfinished: HashMap<&str, &str> =
        tracker.unfinished.iter().map(|(folder, reason)| (&**folder, &**reason)).collect();
    for Listed { entry, .. } in listed {
        if let Some(reason) = unfinished.get(&*entry.name)
            && entry.is_complete()
        {
            entry.complete = Some(false);
            entry.problem = Some((*reason).to_owned());
            entry.strays.clear();
        }
    }
}

/// Adds the files that are checkpoints on their own, and returns how many others there are.
async fn list_files(
    storage: &dyn Storage,
    formats: &FormatRegistry,
    files: Vec<(&str, &ObjectMeta)>,
    listed: &mut Vec<Listed>,
) -> Result<usize, StorageError> {
    let mut opened = 0;
    let recognized: Vec<_> = files
        .into_iter()
        .map(|(name, meta)| {
            let ends = |format: &&Arc<dyn CheckpointFormat>| {
                format.info().file_endings.iter().any(|ending| name.ends_with(ending))
            };
            let by_name = formats.formats().iter().find(ends);
            let is_opened = by_name.is_some() && opened < OPENED_MAX;
            opened += usize::from(is_opened);
            async move {
                if !is_opened {
                    return Ok::<_, StorageError>((name, meta, by_name));
                }
                let head = storage.read_range(&meta.key, 0..meta.byte_len.min(HEAD_BYTES)).await?;
                let mut formats = formats.formats().iter();
                Ok((name, meta, formats.find(|format| format.recognize_file(name, &head))))
            }
        })
        .collect();
    let parallelism = usize::from(storage.capabilities().parallelism.max(1));
    let mut recognized = stream::iter(recognized).buffered(parallelism);
    let mut other = 0;
    while let Some((name, meta, format)) = recognized.try_next().await? {
        match format {
            Some(format) => listed.push(Listed::file(name, meta, Arc::clone(format))),
            None => other += 1,
        }
    }
    Ok(other)
}

/// Examines the last checkpoints.
async fn examine(formats: &FormatRegistry, place: &Place, listed: &mut [Listed]) {
    let mut last: Vec<_> = listed.iter_mut().collect();
    last.sort_by_key(|one| Reverse((one.entry.step, one.entry.modified)));
    last.truncate(EXAMINED_MAX);
    // The first of those with the same files is examined for all.
    let mut firsts: Vec<&mut Listed> = Vec::new();
    let mut others = Vec::new();
    for one in last {
        match firsts.iter().position(|first| same_files(place, &first.entry, &one.entry)) {
            Some(of) => others.push((of, one)),
            None => firsts.push(one),
        }
    }
    let whole = examine_each(formats, place, firsts.into_iter().map(|one| (one, false))).await;
    let others = others.into_iter().map(|(of, one)| {
        let kind = whole.get(of).copied().flatten();
        one.entry.kind = kind.unwrap_or(one.entry.kind);
        (one, kind.is_some())
    });
    examine_each(formats, place, others).await;
}

/// Whether two folders are checkpoints of one format with files of the same names and lengths.
fn same_files(place: &Place, one: &RunEntry, other: &RunEntry) -> bool {
    let root = place.listing().root();
    let folder = |entry: &RunEntry| root.folder(entry.checkpoint.as_deref()?);
    let is_alike = one.kind == other.kind && !one.kind.is_file() && below(one) == below(other);
    is_alike
        && folder(one).zip(folder(other)).is_some_and(|(one, other)| one.has_same_files(&other))
}

/// The folder of what is read of an entry, as a path from the entry.
fn below(entry: &RunEntry) -> Option<&str> {
    let inner = entry.checkpoint.as_deref()?.strip_prefix(&*entry.name)?;
    Some(if inner.is_empty() { "." } else { inner.strip_prefix('/')? })
}

/// Examines checkpoints, each with whether another one of the same files was found whole. Returns
/// the kind of each that is whole.
async fn examine_each(
    formats: &FormatRegistry,
    place: &Place,
    listed: impl Iterator<Item = (&mut Listed, bool)>,
) -> Vec<Option<EntryKind>> {
    let examined = listed.map(|(one, known)| async move {
        let found = match place_of(place, &one.entry, known) {
            Ok(place) => match &one.found {
                Some(found) => examine_match(formats, found, &place).await,
                None => examine_checkpoint(formats, &*one.format, &place).await,
            },
            Err(error) => Err(error),
        };
        if one.lacks_by_names()
            && let Ok(found) = &found
            && (found.opens || found.problem.is_none())
        {
            // Their names are not those of its own files.
            one.entry.complete = Some(true);
            one.entry.problem = None;
            one.entry.checkpoint = Some(one.entry.name.clone());
        }
        note(formats, &mut one.entry, found);
        (one.entry.complete == Some(true)).then_some(one.entry.kind)
    });
    let parallelism = usize::from(place.storage().capabilities().parallelism.max(1));
    let examined: Vec<_> = examined.collect();
    stream::iter(examined).buffered(parallelism).collect().await
}

fn place_of(place: &Place, entry: &RunEntry, known: bool) -> Result<Place, StorageError> {
    if entry.kind.is_file() {
        return Ok(Place::file_of(place.storage(), Key::new(&entry.name)?));
    }
    let place = place.below(&entry.name)?;
    Ok(match below(entry) {
        Some(inner) if known => place.known_files(inner),
        _ => place,
    })
}

/// Notes what a look at a checkpoint has found.
fn note(formats: &FormatRegistry, entry: &mut RunEntry, found: Result<Examined, StorageError>) {
    match found {
        Ok(found) => {
            if let Some(other) = found.format.and_then(|name| formats.by_name(name)) {
                entry.kind = EntryKind::of(other.info(), entry.kind.is_file());
            }
            entry.ephemeral = found.ephemeral;
            entry.version = found.version;
            if let Some(description) = found.unsupported {
                entry.complete = None;
                entry.problem = Some(format!("it {description}"));
                entry.checkpoint = None;
            }
            if let Some(problem) = found.problem
                && entry.complete == Some(true)
            {
                entry.complete = if found.opens { None } else { Some(false) };
                entry.problem = Some(problem);
                entry.strays = found.strays.iter().map(ToString::to_string).collect();
            }
        }
        // One that may not be read does not keep the others from being listed.
        Err(error) if entry.complete == Some(true) => {
            entry.complete = None;
            entry.problem = Some(error_chain(&error));
        }
        Err(_) => {}
    }
}

/// The last number in a name: `iter_0000100`, `epoch=1-step=100.ckpt`.
fn last_number(name: &str) -> Option<u64> {
    let numbers = name.rsplit(|c: char| !c.is_ascii_digit());
    numbers.into_iter().find(|digits| !digits.is_empty())?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::last_number;

    #[test]
    fn names_end_in_numbers() {
        for (name, number) in [
            ("step100", Some(100)),
            ("iter_0000100", Some(100)),
            ("epoch=1-step=200.ckpt", Some(200)),
            ("step3-tmp", Some(3)),
            ("é7é", Some(7)),
            ("release", None),
            (".", None),
            ("step99999999999999999999", None),
        ] {
            assert_eq!(last_number(name), number, "{name}");
        }
    }
}
