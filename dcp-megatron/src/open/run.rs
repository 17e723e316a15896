//! The folder of a training run: `iter_0000010/`, `release/`, and the tracker.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::format::Subfolder;
use dcp_core::storage::{PutMode, StorageExt as _};
use dcp_core::{Key, Payload, Storage, StorageError, StorageErrorKind};
use dcp_jobs::listing::{RunEntry, list_run};

use crate::disk::tracker::{TRACKER, Tracked};
use crate::error::MegatronError;
use crate::open::format::formats;

/// A longer tracker than any, in bytes.
const TRACKER_BYTES_MAX: u64 = 64;

/// The folder of a training run of Megatron-LM.
#[derive(Clone, Debug)]
pub struct MegatronRun {
    storage: Arc<dyn Storage>,
}

/// A checkpoint in the folder of a run.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RunCheckpoint {
    /// The iteration, or the release.
    pub which: Tracked,
    /// The state of its folder: whether it is complete and why not, its size and age.
    pub entry: RunEntry,
}

impl RunCheckpoint {
    /// Whether it is complete, judged by names and lengths.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.entry.is_complete()
    }
}

impl MegatronRun {
    /// The run in `storage`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage }
    }

    /// Reads the tracker; `None` where there is none. The checkpoint that it names need not be
    /// there.
    ///
    /// # Errors
    ///
    /// [`MegatronError::Tracker`] when it cannot be parsed, and when the storage fails.
    pub async fn tracked(&self) -> Result<Option<Tracked>, MegatronError> {
        let key = Key::new(TRACKER).map_err(StorageError::from)?;
        let len = match self.storage.stat(&key).await {
            Ok(meta) => meta.byte_len,
            Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let text = self.storage.read_range(&key, 0..len.min(TRACKER_BYTES_MAX)).await?;
        let tracked = Tracked::parse(&text).map_err(|error| error.in_file(TRACKER, 0));
        tracked.map(Some).map_err(MegatronError::Tracker)
    }

    /// The checkpoint of an iteration, `--ckpt-step` of Megatron-LM, which may not be there.
    ///
    /// # Errors
    ///
    /// Never, as long as numbers make names.
    pub fn checkpoint(&self, which: Tracked) -> Result<Arc<dyn Storage>, StorageError> {
        Ok(Arc::new(Subfolder::new(Arc::clone(&self.storage), which.folder()?)))
    }

    /// All checkpoints in order, `release` first, those too that were not finished.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn checkpoints(&self) -> Result<Vec<RunCheckpoint>, StorageError> {
        let entries = list_run(&self.storage, &formats()).await?.entries.into_iter();
        let mut all: Vec<_> = entries
            .filter_map(|entry| {
                let which = Tracked::of_folder(&entry.name)?;
                Some(RunCheckpoint { which, entry })
            })
            .collect();
        all.sort_by_key(|checkpoint| checkpoint.which.iteration());
        Ok(all)
    }

    /// The last complete checkpoint of the formats that are opened here, whatever the tracker says.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn latest(&self) -> Result<Option<RunCheckpoint>, StorageError> {
        let mut all = self.checkpoints().await?;
        all.retain(|one| one.is_complete() && one.entry.kind.format() == "megatron");
        Ok(all.pop())
    }
}

/// Makes a run's tracker name a checkpoint, in one step: a reader sees the old name or the new one.
/// Megatron-Core's own truncates the file first.
///
/// # Errors
///
/// When the storage fails.
pub async fn write_tracker(run: &dyn Storage, tracked: Tracked) -> Result<(), MegatronError> {
    let key = Key::new(TRACKER).map_err(StorageError::from)?;
    let text = Bytes::from(tracked.to_string());
    run.put(&key, Payload::from(text), PutMode::Overwrite).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_as_megatron_writes_it() {
        let storage = dcp_conformance::MemoryStorage::new();
        let write = write_tracker(&storage, Tracked::Iteration(10));
        futures_util::FutureExt::now_or_never(write).unwrap().unwrap();
        let key = Key::new(TRACKER).unwrap();
        let read = dcp_core::storage::StorageExt::read_all(&storage, &key);
        let bytes = futures_util::FutureExt::now_or_never(read).unwrap().unwrap();
        let fixture = "../fixtures/megatron/run_torch_dist_dp2/latest_checkpointed_iteration.txt";
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture);
        assert_eq!(bytes, std::fs::read(path).unwrap());
    }
}
