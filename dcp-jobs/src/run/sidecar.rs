//! The small files that a run's manager keeps in the folder of a checkpoint. Formats ignore them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_core::digest::fnv1a_64;
use dcp_core::error::{StorageOp, error_chain};
use dcp_core::format::Listing;
use dcp_core::storage::{ObjectMeta, PutMode, StorageExt as _};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::TryStreamExt;
use serde::{Deserialize, Serialize};

use super::lightning::{LIGHTNING_STATE, LightningState};
use super::links::Special;
use super::notes::{Best, Note};
use super::recorded::{TRAINER_STATE, TrainerState, own_metrics};
use super::state_files::compared_name;

/// A checkpoint with this file is pinned.
pub(super) const PIN: &str = ".dcp-pin";
/// The metrics of a checkpoint.
pub(super) const METRICS: &str = ".dcp-metrics.json";
/// A checkpoint with this file is being deleted, unless it is still whole or was saved again.
pub(super) const DELETING: &str = ".dcp-deleting";

const PIN_TEXT: &str = "Retention policies keep this checkpoint.\n";
/// The note in the mark of a deletion, by which a file is known as one.
const MARK_NOTE: &str = "this checkpoint is being deleted; the next deletion finishes it";
/// The longest mark of a deletion that is read, in bytes.
const MARK_BYTES_MAX: u64 = 64 << 10;
/// Files of the state of Lightning in one folder that are read.
const STATES_MAX: usize = 8;
/// The longest state of a trainer that is read, in bytes: those of several checkpoints are read at once.
pub(super) const STATE_BYTES_MAX: u64 = 16 << 20;

/// The contents of the small files of one checkpoint.
#[derive(Clone, Debug, Default)]
pub(super) struct Sidecars {
    pub(super) pinned: bool,
    pub(super) deleting: Option<Mark>,
    /// Whether a save has written into the folder since its deletion began.
    pub(super) saved_again: bool,
    pub(super) metrics: BTreeMap<String, f64>,
    /// The notes on the best checkpoints in files of the trainer's state.
    pub(super) notes: Vec<Note>,
    /// The time of the newest file that is none of these.
    pub(super) modified: Option<SystemTime>,
    /// Identifies the files, on a file system.
    pub(super) identity: Option<u64>,
    /// The reason that the trainer's state cannot be read, so that a resume may fail.
    pub(super) unreadable_state: Option<String>,
    /// The files that a resume needs besides weights; see [`compared_name`].
    pub(super) state_files: BTreeSet<String>,
}

/// The mark of a deletion that has begun.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Mark {
    /// The format of the checkpoint.
    format: String,
    note: String,
    /// The time of the newest file in the folder when the deletion began, in nanoseconds since 1970. It
    /// is older than a save that comes later by far more than the resolution of times, which are
    /// whole seconds on some stores. The time of the mark is not: a save may begin in its second.
    newest_ns: Option<u64>,
    /// The time of the mark.
    #[serde(skip)]
    written: Option<SystemTime>,
}

impl Mark {
    /// The mark of a deletion of `files`, which is about to begin.
    pub(super) fn new(format: &str, files: &[ObjectMeta]) -> Self {
        let note = MARK_NOTE.to_owned();
        let files = files.iter().filter(|file| file.key.file_name() != DELETING);
        let newest = files.map(|file| file.modified).max().flatten();
        let since = newest.and_then(|newest| newest.duration_since(UNIX_EPOCH).ok());
        let newest_ns = since.and_then(|since| u64::try_from(since.as_nanos()).ok());
        Self { format: format.to_owned(), note, newest_ns, written: None }
    }

    /// Reads the mark in a folder; `None` for a file that no deletion wrote. It is written as a whole, and an empty
    /// file or one of another program does not show that a deletion began.
    pub(super) async fn read(
        storage: &dyn Storage,
        meta: &ObjectMeta,
    ) -> Result<Option<Self>, StorageError> {
        let len = meta.byte_len.min(MARK_BYTES_MAX);
        let json = match storage.read_range(&meta.key, 0..len).await {
            Ok(json) => json,
            Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mark = serde_json::from_slice::<Self>(&json).ok().filter(|mark| mark.note == MARK_NOTE);
        Ok(mark.map(|mark| Self { written: meta.modified, ..mark }))
    }

    /// Whether a file in the folder was written after the deletion began, by a save. So it is where that
    /// is unknown.
    pub(super) fn is_older_than(&self, file: &ObjectMeta) -> bool {
        if file.key.file_name() == DELETING {
            return false;
        }
        let newest = self.newest_ns.and_then(|ns| UNIX_EPOCH.checked_add(Duration::from_nanos(ns)));
        match (file.modified, newest, self.written) {
            (Some(file), Some(newest), _) => file > newest,
            (Some(file), None, Some(mark)) => file >= mark,
            _ => true,
        }
    }

    /// Whether a checkpoint of this format, which is complete, has lost nothing yet: the first file
    /// that a deletion removes makes it incomplete. What is left may be a checkpoint of another
    /// format. A folder that was of no format when its deletion began has become a checkpoint since.
    pub(super) fn spares(&self, format: &str) -> bool {
        self.format.is_empty() || self.format == format
    }
}

#[derive(Debug, Serialize)]
struct MetricsFile {
    metrics: BTreeMap<String, f64>,
}

impl Sidecars {
    /// Lists the folder of the checkpoint of a step, and reads what is recorded of it. Metrics that
    /// cannot be parsed are unknown. `special` are the entries of the run that are no regular files.
    pub(super) async fn read(
        storage: &dyn Storage,
        folder: &Key,
        step: u64,
        special: &[Special],
    ) -> Result<Self, StorageError> {
        let mut found = Self::default();
        let (mut metrics, mut mark, mut state, mut lightning) = (None, None, None, Vec::new());
        let mut states = 0;
        let mut files = Vec::new();
        let mut listed = storage.list(Some(folder));
        while let Some(meta) = listed.try_next().await? {
            let is_direct =
                meta.key.as_str().get(folder.as_str().len() + 1..) == Some(meta.key.file_name());
            match meta.key.file_name() {
                // Also in a run in this folder, which goes with it.
                PIN => found.pinned = true,
                DELETING if is_direct => mark = Some(meta),
                METRICS if is_direct => metrics = Some(meta),
                name => {
                    if is_direct && name == TRAINER_STATE {
                        state = Some(meta.clone());
                    } else if name == LIGHTNING_STATE {
                        // The name of a metric with a slash makes a folder in the folder of the step.
                        states += 1;
                        if states <= STATES_MAX {
                            lightning.push(meta.clone());
                        }
                    }
                    files.push(meta);
                }
            }
            if files.len() >= Listing::OBJECTS_MAX {
                break;
            }
        }
        drop(listed);
        let relative = |file: &ObjectMeta| {
            let path = file.key.as_str().get(folder.as_str().len() + 1..)?;
            compared_name(path, file.byte_len)
        };
        found.state_files = files.iter().filter_map(relative).collect();
        found.modified = files.iter().filter_map(|file| file.modified).max();
        if !storage.capabilities().complete_listing {
            found.identity = identity(folder, &mut files);
        }
        if let Some(meta) = mark
            && let Some(mark) = Mark::read(storage, &meta).await?
        {
            found.saved_again = files.iter().any(|file| mark.is_older_than(file));
            found.deleting = Some(mark);
        }
        let path = folder.as_str();
        let listed: BTreeSet<&str> = files.iter().map(|file| file.key.as_str()).collect();
        let special = special.iter().filter(|entry| {
            let below = entry.path.strip_prefix(path);
            below.is_some_and(|below| below.starts_with('/')) && !listed.contains(&*entry.path)
        });
        let written = found.modified;
        let note = |file: &str, best: Best| {
            let of_step = Some(path.to_owned());
            Note { file: file.to_owned(), of_step, step: Some(step), written, best }
        };
        let mut metrics_are_known = true;
        for Special { path, what } in special {
            match path.rsplit('/').next() {
                Some(PIN) => found.pinned = true,
                Some(METRICS) => metrics_are_known = false,
                _ => {
                    found.unreadable_state = Some(format!("its {path:?} {what}"));
                    found.notes.push(note(path, Best::Unclear((*what).to_owned())));
                }
            }
        }
        if states > STATES_MAX {
            let problem = format!("is one of {states}, of which dcp reads {STATES_MAX}");
            let file = format!("{path}/{LIGHTNING_STATE}");
            found.notes.push(note(&file, Best::Unclear(problem)));
        }
        if let Some(file) = state {
            let read = |json: Vec<u8>| TrainerState::parse(&json, Some(step));
            let best = match read_state(storage, &file, read).await? {
                Ok(state) => {
                    found.metrics = state.metrics;
                    let best = state.best_checkpoint.path();
                    let is_best = best.is_some_and(|path| names_folder(path, folder.file_name()));
                    if let (true, Some(value)) = (is_best, state.best_metric) {
                        found.metrics.insert("best_metric".to_owned(), value);
                    }
                    state.best_checkpoint.into_best()
                }
                Err(problem) => {
                    found.unreadable_state = Some(format!("its {TRAINER_STATE} {problem}"));
                    Best::Unclear(problem)
                }
            };
            found.notes.push(note(file.key.as_str(), best));
        }
        for file in lightning {
            let read = |state| LightningState::parse(state, folder.file_name());
            let best = match read_state(storage, &file, read).await? {
                Ok(state) => {
                    found.metrics.extend(state.metrics);
                    state.best
                }
                Err(problem) => {
                    found.unreadable_state = Some(format!("its {LIGHTNING_STATE} {problem}"));
                    Best::Unclear(problem)
                }
            };
            found.notes.push(note(file.key.as_str(), best));
        }
        if let Some(file) = metrics {
            match read_state(storage, &file, |json| own_metrics(&json)).await? {
                Ok(metrics) => found.metrics.extend(metrics),
                Err(_) => metrics_are_known = false,
            }
        }
        // Those of the trainer may be others.
        if !metrics_are_known {
            found.metrics.clear();
        }
        Ok(found)
    }
}

/// Whether a folder of that name is on a path, which text of a file, or a link has: as a whole component
/// of a path, whatever characters it has, or as a word of a text.
pub(super) fn names_folder(text: &str, name: &str) -> bool {
    let mut components = text.split(['/', '\\', '\n', '\r', '"', '\'']);
    if components.any(|component| component == name || component.trim() == name) {
        return true;
    }
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | '=');
    text.split(|c: char| !is_part(c)).any(|part| part == name)
}

/// A digest of the files of a folder: two folders with the same one are the same place, seen under two
/// names, or consist of hard links. `None` where the storage has no versions.
fn identity(folder: &Key, files: &mut [ObjectMeta]) -> Option<u64> {
    files.sort_by(|a, b| a.key.cmp(&b.key));
    let mut text = Vec::new();
    for file in &*files {
        text.extend_from_slice(file.key.as_str().get(folder.as_str().len()..)?.as_bytes());
        text.push(0);
        text.extend_from_slice(file.version.as_ref()?.as_str().as_bytes());
        text.push(0);
    }
    (!files.is_empty()).then(|| fnv1a_64(text))
}

/// Reads and parses a small file that decides what is kept. What is wrong with it is a clause about
/// the file.
pub(super) async fn read_state<T>(
    storage: &dyn Storage,
    file: &ObjectMeta,
    parse: impl FnOnce(Vec<u8>) -> Option<T>,
) -> Result<Result<T, String>, StorageError> {
    let len = file.byte_len;
    if len > STATE_BYTES_MAX {
        let max = STATE_BYTES_MAX >> 20;
        return Ok(Err(format!("is {len} bytes long, and dcp reads at most {max} MiB")));
    }
    let bytes = match storage.read_range(&file.key, 0..len).await {
        Ok(bytes) => bytes.to_vec(),
        Err(error) if error.kind() == StorageErrorKind::NotFound => {
            return Ok(Err("went away while it was read".to_owned()));
        }
        Err(error) if error.is_retryable() => return Err(error),
        Err(error) => return Ok(Err(format!("cannot be read: {}", error_chain(&error)))),
    };
    Ok(parse(bytes).ok_or_else(|| "cannot be parsed".to_owned()))
}

/// The bytes of a file, unless it is longer than such a file is, or gone.
pub(super) async fn read_at_most(
    storage: &dyn Storage,
    file: Option<ObjectMeta>,
    max: u64,
) -> Result<Option<Vec<u8>>, StorageError> {
    let Some(file) = file.filter(|file| file.byte_len <= max) else { return Ok(None) };
    match storage.read_range(&file.key, 0..file.byte_len).await {
        Ok(bytes) => Ok(Some(bytes.to_vec())),
        Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes the metrics of a checkpoint, or removes them where there are none. Values that are no
/// numbers are left out.
pub(super) async fn write_metrics(
    storage: &dyn Storage,
    folder: &Key,
    metrics: &BTreeMap<String, f64>,
) -> Result<(), StorageError> {
    let finite = metrics.iter().filter(|(_, value)| value.is_finite());
    let file =
        MetricsFile { metrics: finite.map(|(name, value)| (name.clone(), *value)).collect() };
    let key = folder.join(METRICS)?;
    if file.metrics.is_empty() {
        return storage.delete(&[key]).await;
    }
    let json = serde_json::to_vec_pretty(&file).map_err(|error| {
        StorageError::new(StorageErrorKind::Invalid, StorageOp::Put, Some(key.clone()))
            .with_message(error.to_string())
    })?;
    put(storage, &key, Payload::from(json)).await
}

/// Pins a checkpoint.
pub(super) async fn pin(storage: &dyn Storage, folder: &Key) -> Result<(), StorageError> {
    put(storage, &folder.join(PIN)?, PIN_TEXT.into()).await
}

/// Ends the pin of a checkpoint.
pub(super) async fn unpin(storage: &dyn Storage, folder: &Key) -> Result<(), StorageError> {
    storage.delete(&[folder.join(PIN)?]).await
}

/// Marks a checkpoint as one that is being deleted. On a full storage it goes without: then
/// only the age of its files distinguishes the rest from a save under way.
pub(super) async fn mark_deleting(
    storage: &dyn Storage,
    folder: &Key,
    mark: &Mark,
) -> Result<(), StorageError> {
    let json = serde_json::to_vec_pretty(mark).unwrap_or_default();
    match put(storage, &folder.join(DELETING)?, Payload::from(json)).await {
        Err(error) if error.kind() == StorageErrorKind::Full => Ok(()),
        marked => marked,
    }
}

async fn put(storage: &dyn Storage, key: &Key, payload: Payload) -> Result<(), StorageError> {
    storage.put(key, payload, PutMode::Overwrite).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_any_name_is_found_on_a_path() {
        for name in ["step-2", "epoch=0-step=20-acc@5=0.90.ckpt", "a b", "é+~%"] {
            for text in [name.to_owned(), format!("/runs/{name}/model.pt\n"), format!("\"{name}\"")]
            {
                assert!(names_folder(&text, name), "{text}");
            }
            assert!(!names_folder(&format!("/runs/x{name}"), name));
        }
        assert!(names_folder("the last is step-2, of 3", "step-2"));
    }
}
