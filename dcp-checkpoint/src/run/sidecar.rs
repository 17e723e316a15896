//! The small files that a run's manager keeps in the folder of a checkpoint. Formats ignore them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_core::error::StorageOp;
use dcp_core::storage::{FolderEntry, ObjectMeta, PutMode, StorageExt as _};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
use futures_util::TryStreamExt;
use serde::{Deserialize, Serialize};

/// A checkpoint with this file is pinned.
pub(super) const PIN: &str = ".dcp-pin";
/// The metrics of a checkpoint.
pub(super) const METRICS: &str = ".dcp-metrics.json";
/// A checkpoint with this file is being deleted, unless it is still whole or was saved again.
pub(super) const DELETING: &str = ".dcp-deleting";

const PIN_TEXT: &str = "Retention policies and `dcp prune` keep this checkpoint.\n";
/// The longest mark of a deletion that is read, in bytes.
const MARK_BYTES_MAX: u64 = 64 << 10;
/// The longest file of metrics, in bytes.
const METRICS_BYTES_MAX: u64 = 1 << 20;

/// What the small files of one checkpoint say.
#[derive(Clone, Debug, Default)]
pub(super) struct Sidecars {
    pub(super) pinned: bool,
    pub(super) deleting: Option<Mark>,
    /// Whether a save has written into the folder since its deletion began.
    pub(super) saved_again: bool,
    pub(super) metrics: BTreeMap<String, f64>,
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
    /// When the mark was written.
    #[serde(skip)]
    written: Option<SystemTime>,
}

impl Mark {
    /// The mark of a deletion of `files`, which is about to begin.
    pub(super) fn new(format: &str, files: &[ObjectMeta]) -> Self {
        let note = "this checkpoint is being deleted; `dcp prune` finishes it".to_owned();
        let files = files.iter().filter(|file| file.key.file_name() != DELETING);
        let newest = files.map(|file| file.modified).max().flatten();
        let since = newest.and_then(|newest| newest.duration_since(UNIX_EPOCH).ok());
        let newest_ns = since.and_then(|since| u64::try_from(since.as_nanos()).ok());
        Self { format: format.to_owned(), note, newest_ns, written: None }
    }

    /// Reads the mark in a folder. One that cannot be parsed is a mark all the same.
    pub(super) async fn read(
        storage: &dyn Storage,
        meta: &ObjectMeta,
    ) -> Result<Self, StorageError> {
        let len = meta.byte_len.min(MARK_BYTES_MAX);
        let json = match storage.read_range(&meta.key, 0..len).await {
            Ok(json) => json,
            Err(error) if error.kind() == StorageErrorKind::NotFound => Default::default(),
            Err(error) => return Err(error),
        };
        let mark = serde_json::from_slice::<Self>(&json).unwrap_or_default();
        Ok(Self { written: meta.modified, ..mark })
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
    /// format.
    pub(super) fn spares(&self, format: &str) -> bool {
        self.format == format
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct MetricsFile {
    metrics: BTreeMap<String, f64>,
}

impl Sidecars {
    /// Lists the folder of a checkpoint, and reads its metrics. Metrics that cannot be parsed are
    /// none: they decide nothing but which checkpoint is the best.
    pub(super) async fn read(storage: &dyn Storage, folder: &Key) -> Result<Self, StorageError> {
        let mut found = Self::default();
        let (mut metrics, mut mark): (Option<ObjectMeta>, Option<ObjectMeta>) = (None, None);
        let mut entries = storage.list_folder(Some(folder));
        while let Some(entry) = entries.try_next().await? {
            let FolderEntry::Object(meta) = entry else { continue };
            match meta.key.file_name() {
                PIN => found.pinned = true,
                DELETING => mark = Some(meta),
                METRICS => metrics = Some(meta),
                _ => {}
            }
        }
        if let Some(meta) = mark {
            let mark = Mark::read(storage, &meta).await?;
            let mut files = storage.list(Some(folder));
            while let (false, Some(file)) = (found.saved_again, files.try_next().await?) {
                found.saved_again = mark.is_older_than(&file);
            }
            found.deleting = Some(mark);
        }
        if let Some(meta) = metrics.filter(|meta| meta.byte_len <= METRICS_BYTES_MAX) {
            match storage.read_range(&meta.key, 0..meta.byte_len).await {
                Ok(json) => {
                    let parsed = serde_json::from_slice::<MetricsFile>(&json);
                    found.metrics = parsed.map(|file| file.metrics).unwrap_or_default();
                }
                Err(error) if error.kind() == StorageErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
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
