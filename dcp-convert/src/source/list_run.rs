//! The checkpoints in a directory: what each is, whether it is whole, how large, how old.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dcp_core::{
    Key, ObjectMeta, Quoted, Storage, StorageError, StorageErrorKind, StorageExt, error_chain,
};
use dcp_formats::detect::{is_torch_save, natural};
use dcp_formats::folder::{FolderKind, FolderNames, OLMO_COMMIT, OLMO_MODEL, OlmoNote};
use futures_util::{StreamExt, stream};
use serde::Serialize;

use crate::source::completeness;

/// Files looked at before the listing is given up.
const LISTED_MAX: usize = 1_000_000;
/// Entries of the directory that are told apart.
const ENTRIES_MAX: usize = 100_000;
/// Files of the directory that are opened to see whether `torch.save` wrote them.
const OPENED_MAX: usize = 256;
/// Checkpoints, the last ones, whose indexes are compared with their files.
const CLOSER_MAX: usize = 64;
/// Where a run of Megatron-LM says which iteration was saved last.
const MEGATRON_TRACKER: &str = "latest_checkpointed_iteration.txt";

/// The checkpoints in a directory. Serialized, it is the output of `dcp ls --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunListing {
    /// The checkpoints, in natural order of their names; the directory itself is called `.`.
    pub entries: Vec<RunEntry>,
    /// The name of the last whole one that is numbered.
    pub latest: Option<String>,
    /// Files and folders that are no checkpoints.
    pub other: usize,
    /// Whether there are more files than are looked at, so that not all is known.
    pub truncated: bool,
    /// What is wrong with the tracker of a run of Megatron-LM, where it names no whole checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tracker_problem: Option<String>,
}

/// A checkpoint in a directory.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RunEntry {
    /// Its file or folder.
    pub name: String,
    /// What it is.
    pub kind: EntryKind,
    /// Whether all is there that its format needs, as far as names, lengths and small indexes tell;
    /// `None` when not all of them were seen, or could be.
    pub complete: Option<bool>,
    /// Why it is not whole.
    pub problem: Option<String>,
    /// The number that its name ends in, of steps as a rule.
    pub step: Option<u64>,
    /// Whether the trainer may remove it when a later one is there, where it says so.
    pub ephemeral: Option<bool>,
    /// The version of the program that wrote it, where it says so.
    pub version: Option<String>,
    /// Files below it.
    pub files: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// When the last of them was written, in seconds since 1970, where the storage knows.
    pub modified: Option<u64>,
    /// What to open to read it, relative to the directory; `None` where nothing can be read.
    pub checkpoint: Option<String>,
}

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EntryKind {
    /// A folder.
    Folder(FolderKind),
    /// A file of `torch.save`.
    TorchSaveFile,
}

impl EntryKind {
    /// A short name for scripts, such as `olmo`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Folder(kind) => kind.name(),
            Self::TorchSaveFile => "torch_save_file",
        }
    }
}

impl std::fmt::Display for EntryKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Folder(kind) => kind.fmt(f),
            Self::TorchSaveFile => f.write_str("torch.save file"),
        }
    }
}

impl Serialize for EntryKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// What is found below a name.
#[derive(Clone, Debug, Default)]
struct Found {
    names: FolderNames,
    files: u64,
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Found {
    fn count(&mut self, meta: &ObjectMeta) {
        self.files += 1;
        self.bytes = self.bytes.saturating_add(meta.byte_len);
        self.modified = self.modified.max(meta.modified);
    }

    fn entry(&self, name: &str, kind: EntryKind) -> RunEntry {
        let seconds = |time: SystemTime| Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs());
        RunEntry {
            name: name.to_owned(),
            kind,
            complete: Some(true),
            problem: None,
            step: last_number(name),
            ephemeral: None,
            version: None,
            files: self.files,
            bytes: self.bytes,
            modified: self.modified.and_then(seconds),
            checkpoint: None,
        }
    }
}

/// Lists the checkpoints in the directory of `storage`, whoever wrote them: OLMo-core's steps,
/// folders of DCP, Megatron and Hugging Face, files of `torch.save`. Names and sizes are looked
/// at, and the few small files in which trainers note what they think of a checkpoint. For the
/// last 64 checkpoints, small indexes (below 1 MiB) are compared with the lengths of the files
/// they name, and the ends of files of `torch.save` are looked for; no tensor is read.
///
/// # Errors
///
/// When the storage fails.
pub async fn list_run(storage: &Arc<dyn Storage>) -> Result<RunListing, StorageError> {
    let mut whole = Found::default();
    let mut folders: BTreeMap<String, Found> = BTreeMap::new();
    let mut files = Vec::new();
    let mut truncated = false;
    let mut objects = storage.list(None);
    while let Some(meta) = objects.next().await {
        let meta = meta?;
        if whole.files >= LISTED_MAX as u64 {
            truncated = true;
            break;
        }
        whole.count(&meta);
        let name = meta.key.as_str();
        let Some((folder, inner)) = name.split_once('/') else {
            whole.names.add(name);
            if files.len() < ENTRIES_MAX {
                files.push(meta);
            }
            continue;
        };
        // What lies in folders of their own is not this directory's, but for parts of a step.
        if is_part(folder) {
            whole.names.add(name);
        }
        if !folders.contains_key(folder) && folders.len() >= ENTRIES_MAX {
            truncated = true;
            continue;
        }
        let found = folders.entry(folder.to_owned()).or_default();
        found.names.add(inner);
        found.count(&meta);
    }
    let mut listing = RunListing { truncated, ..RunListing::default() };
    let own = whole.names.verdict(".").filter(|own| own.kind != FolderKind::TorchSave);
    if own.is_some() {
        folders.retain(|name, _| !is_part(name));
        folders.insert(".".to_owned(), whole);
    }
    for (name, found) in &folders {
        match folder_entry(name, found, truncated) {
            Some(entry) => listing.entries.push(entry),
            None => listing.other += 1,
        }
    }
    let told = megatron_tracker(&**storage, &files).await?;
    let tracked = match &told {
        Some(Ok(tracked)) => Some(*tracked),
        _ => None,
    };
    if let Some(Tracked::Iteration(tracked)) = tracked {
        judge_megatron(&mut listing.entries, tracked);
    }
    // A file of a checkpoint that is the directory itself is none of its own.
    if own.is_none() {
        let entries = torch_files(&**storage, files).await?;
        listing.other += entries.1;
        listing.entries.extend(entries.0);
    }
    read_notes(&**storage, &mut listing.entries).await?;
    look_closer(&**storage, &mut listing.entries).await;
    listing.entries.sort_by_cached_key(|entry| natural(&entry.name));
    let whole = listing.entries.iter().filter(|e| e.complete == Some(true) && e.step.is_some());
    let mut latest = whole.max_by_key(|entry| entry.step);
    if tracked == Some(Tracked::Release) {
        let release = |entry: &&RunEntry| entry.name == "release" && entry.complete == Some(true);
        latest = listing.entries.iter().find(release).or(latest);
    }
    listing.latest = latest.map(|entry| entry.name.clone());
    listing.tracker_problem = told.and_then(|told| tracker_problem(told, &listing));
    Ok(listing)
}

/// Whether a folder is a part of a checkpoint and none of its own.
fn is_part(folder: &str) -> bool {
    matches!(folder, OLMO_MODEL | "train") || folder.starts_with("mp_rank_")
}

fn folder_entry(name: &str, found: &Found, truncated: bool) -> Option<RunEntry> {
    let verdict = found.names.verdict(name)?;
    let mut entry = found.entry(name, EntryKind::Folder(verdict.kind));
    let at = |inner: &str| match name {
        "." => inner.to_owned(),
        _ => format!("{name}/{inner}"),
    };
    entry.checkpoint = match (&verdict.inner, &verdict.problem) {
        (Some(inner), _) => Some(at(inner)),
        (None, None) => Some(name.to_owned()),
        _ => None,
    };
    entry.complete = Some(verdict.problem.is_none());
    entry.problem = verdict.problem;
    if truncated && entry.problem.is_some() {
        entry.complete = None;
        entry.problem = Some("there are too many files to have seen all of them".to_owned());
    }
    Some(entry)
}

/// The files that `torch.save` wrote, and how many others there are.
async fn torch_files(
    storage: &dyn Storage,
    files: Vec<ObjectMeta>,
) -> Result<(Vec<RunEntry>, usize), StorageError> {
    const ENDINGS: [&str; 4] = [".pt", ".pth", ".bin", ".ckpt"];
    let (mut entries, mut other) = (Vec::new(), 0);
    let mut opened = 0;
    for meta in files {
        let name = meta.key.as_str();
        let mut is_one = ENDINGS.iter().any(|ending| name.ends_with(ending));
        if is_one && opened < OPENED_MAX {
            opened += 1;
            is_one = is_torch_save(storage, &meta.key).await?;
        }
        if is_one {
            let mut found = Found::default();
            found.count(&meta);
            let mut entry = found.entry(name, EntryKind::TorchSaveFile);
            entry.checkpoint = Some(name.to_owned());
            entries.push(entry);
        } else {
            other += 1;
        }
    }
    Ok((entries, other))
}

/// What a run of Megatron-LM says it saved last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tracked {
    Iteration(u64),
    /// A checkpoint of no iteration, in the folder `release`.
    Release,
}

impl Tracked {
    /// The folder of it in the run.
    fn folder(self) -> String {
        match self {
            Self::Iteration(iteration) => format!("iter_{iteration:07}"),
            Self::Release => "release".to_owned(),
        }
    }
}

/// What the tracker says, or its text where that makes no sense; `None` where there is none.
async fn megatron_tracker(
    storage: &dyn Storage,
    files: &[ObjectMeta],
) -> Result<Option<Result<Tracked, String>>, StorageError> {
    const BYTES_MAX: u64 = 64;
    let tracker = files.iter().find(|meta| meta.key.as_str() == MEGATRON_TRACKER);
    let Some(tracker) = tracker else { return Ok(None) };
    let text = storage.read_range(&tracker.key, 0..tracker.byte_len.min(BYTES_MAX)).await?;
    let text = String::from_utf8_lossy(&text);
    Ok(Some(match (text.trim(), tracker.byte_len) {
        ("release", _) => Ok(Tracked::Release),
        (number, ..=BYTES_MAX) if let Ok(number) = number.parse() => Ok(Tracked::Iteration(number)),
        (other, _) => Err(other.to_owned()),
    }))
}

fn tracker_problem(told: Result<Tracked, String>, listing: &RunListing) -> Option<String> {
    let tracked = match told {
        Ok(tracked) => tracked.folder(),
        Err(text) => {
            let text = Quoted(&text);
            return Some(format!("{MEGATRON_TRACKER} says {text}, which is no iteration"));
        }
    };
    let what = match listing.entries.iter().find(|entry| entry.name == tracked) {
        None => "is not there",
        Some(entry) if entry.complete == Some(false) => "is not complete",
        Some(_) => return None,
    };
    Some(format!("{MEGATRON_TRACKER} names {tracked}, which {what}"))
}

/// The tracker is written when a save is complete, so what lies beyond it is not.
fn judge_megatron(entries: &mut [RunEntry], tracked: u64) {
    for entry in entries {
        let beyond = entry.step.is_some_and(|step| step > tracked);
        let megatron = entry.name.starts_with("iter_");
        if megatron && beyond && entry.complete == Some(true) {
            entry.complete = Some(false);
            entry.problem =
                Some(format!("{MEGATRON_TRACKER} is at {tracked}: it was not finished"));
        }
    }
}

/// Compares the indexes of the last checkpoints with the files they name.
async fn look_closer(storage: &dyn Storage, entries: &mut [RunEntry]) {
    let mut whole: Vec<usize> = (0..entries.len()).collect();
    whole.retain(|at| entries.get(*at).is_some_and(|entry| entry.complete == Some(true)));
    whole.sort_by_key(|at| entries.get(*at).map(|entry| Reverse((entry.step, entry.modified))));
    for entry in whole.into_iter().take(CLOSER_MAX) {
        let Some(entry) = entries.get_mut(entry) else { continue };
        let Some(place) = &entry.checkpoint else { continue };
        let problem = match entry.kind {
            EntryKind::Folder(FolderKind::Dcp | FolderKind::OlmoStep) => {
                completeness::dcp_problem(storage, place).await
            }
            EntryKind::Folder(FolderKind::HuggingFace) => {
                completeness::hugging_face_problem(storage, place).await
            }
            EntryKind::TorchSaveFile => match Key::new(place) {
                Ok(key) => completeness::torch_save_problem(storage, &key).await,
                Err(error) => Err(error.into()),
            },
            EntryKind::Folder(FolderKind::Megatron) => {
                completeness::megatron_problem(storage, place).await
            }
            EntryKind::Folder(_) => continue,
        };
        match problem {
            Ok(None) => {}
            Ok(Some(problem)) => {
                entry.complete = Some(false);
                entry.problem = Some(problem);
            }
            // One that may not be read does not keep the others from being listed.
            Err(error) => {
                entry.complete = None;
                entry.problem = Some(error_chain(&error));
            }
        }
    }
}

/// Reads what OLMo-core notes beside its checkpoints.
async fn read_notes(storage: &dyn Storage, entries: &mut [RunEntry]) -> Result<(), StorageError> {
    let olmo = |entry: &RunEntry| entry.kind == EntryKind::Folder(FolderKind::OlmoStep);
    let parallelism = usize::from(storage.capabilities().parallelism.max(1));
    let reads = entries.iter().enumerate().filter(|(_, entry)| olmo(entry));
    let reads: Vec<_> = reads
        .map(|(at, entry)| (at, entry.name.clone()))
        .map(|(at, name)| async move { Ok::<_, StorageError>((at, note(storage, &name).await?)) })
        .collect();
    let mut notes = stream::iter(reads).buffer_unordered(parallelism);
    let mut all = Vec::new();
    while let Some(note) = notes.next().await {
        all.push(note?);
    }
    for (at, note) in all {
        if let (Some(note), Some(entry)) = (note, entries.get_mut(at)) {
            entry.ephemeral = Some(note.ephemeral);
            entry.version = note.version;
        }
    }
    Ok(())
}

async fn note(storage: &dyn Storage, step: &str) -> Result<Option<OlmoNote>, StorageError> {
    let name = match step {
        "." => OLMO_COMMIT.to_owned(),
        _ => format!("{step}/{OLMO_COMMIT}"),
    };
    let key = Key::new(name)?;
    let meta = match storage.stat(&key).await {
        Ok(meta) if meta.byte_len <= OlmoNote::BYTES_MAX => meta,
        Ok(_) => return Ok(None),
        Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(OlmoNote::parse(&storage.read_range(&key, 0..meta.byte_len).await?).ok())
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
