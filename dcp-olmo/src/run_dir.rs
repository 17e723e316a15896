//! The folders of a training run: `step{N}/`, and what is in one.

use std::sync::Arc;

use dcp_core::format::Subfolder;
use dcp_core::storage::StorageExt;
use dcp_core::{Key, Storage, StorageError, StorageErrorKind};
use dcp_formats::dcp::DcpReader;
use dcp_formats::torch_save::TorchSaveReader;
use dcp_jobs::listing::{RunEntry, list_run};
use futures_util::StreamExt;

use crate::format::{COMMIT, MODEL_FOLDER, OlmoNote, TRAIN, formats, olmo_step};

/// A longer configuration than any run has, in bytes.
const CONFIG_BYTES_MAX: u64 = 64 << 20;

/// The folder of a training run.
#[derive(Clone, Debug)]
pub struct RunDir {
    storage: Arc<dyn Storage>,
}

impl RunDir {
    /// The run in `storage`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage }
    }

    /// Its steps in order, those too that were not finished; see [`RunEntry::complete`]. Folders
    /// of a save that goes on or died, `step{N}-tmp`, are among them.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn steps(&self) -> Result<Vec<RunEntry>, StorageError> {
        let mut entries = list_run(&self.storage, &formats()).await?.entries;
        entries.retain(|entry| entry.kind.format() == "olmo" && entry.name != ".");
        entries.sort_by_key(|entry| entry.step);
        Ok(entries)
    }

    /// The complete checkpoint of the highest step, as OLMo-core (3.0) finds it: by names alone.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    #[doc(alias = "find_checkpoints")]
    pub async fn latest_checkpoint(&self) -> Result<Option<StepDir>, StorageError> {
        let steps = self.steps().await?;
        let latest = steps
            .iter()
            .filter(|entry| entry.is_complete())
            .filter_map(|entry| olmo_step(&entry.name))
            .max();
        latest.map(|step| self.step(step)).transpose()
    }

    /// The checkpoint of a step, which may not be there.
    ///
    /// # Errors
    ///
    /// Never, as long as numbers make names.
    pub fn step(&self, step: u64) -> Result<StepDir, StorageError> {
        self.folder(&format!("step{step}"))
    }

    /// The checkpoint in a folder of any name, such as that of a [`RunEntry`].
    ///
    /// # Errors
    ///
    /// When it is no name of a folder.
    pub fn folder(&self, name: &str) -> Result<StepDir, StorageError> {
        let folder = Key::new(name)?;
        Ok(StepDir::new(Arc::new(Subfolder::new(Arc::clone(&self.storage), folder))))
    }
}

/// The folder of one checkpoint of a run. Nothing in here lists, so it may be on a web server,
/// but for [`train_ranks`](Self::train_ranks).
#[derive(Clone, Debug)]
pub struct StepDir {
    storage: Arc<dyn Storage>,
}

impl StepDir {
    /// The checkpoint in `storage`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage }
    }

    /// The files of the checkpoint.
    #[must_use]
    pub fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The folder with the model and the optimizer; the folder itself when it is that one.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn model_and_optim(&self) -> Result<Arc<dyn Storage>, StorageError> {
        if self.contains(".metadata").await? {
            return Ok(Arc::clone(&self.storage));
        }
        let folder = Key::new(MODEL_FOLDER)?;
        Ok(Arc::new(Subfolder::new(Arc::clone(&self.storage), folder)))
    }

    /// A reader of the model and the optimizer.
    ///
    /// # Errors
    ///
    /// When the storage fails; what is wrong with the checkpoint is found on the first read.
    pub async fn reader(&self) -> Result<DcpReader, StorageError> {
        Ok(DcpReader::new(self.model_and_optim().await?))
    }

    /// Whether OLMo-core (3.0) would take this for a checkpoint: a folder with a `.metadata`, or
    /// one with all of `train/rank0.pt`, `model_and_optim/.metadata` and `.metadata.json`.
    /// Contents are not looked at.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    #[doc(alias = "dcp_is_checkpoint")]
    #[doc(alias = "is_checkpoint")]
    pub async fn dir_is_checkpoint(&self) -> Result<bool, StorageError> {
        Ok(self.contains(".metadata").await?
            || self.contains(TRAIN).await?
                && self.contains(&format!("{MODEL_FOLDER}/.metadata")).await?
                && self.contains(COMMIT).await?)
    }

    /// Reads the trainer's note about the checkpoint; `None` where there is none yet.
    ///
    /// # Errors
    ///
    /// When the storage fails, or the note is longer than any note is.
    pub async fn note(&self) -> Result<Option<OlmoNote>, dcp_core::CheckpointError> {
        let json = self.small(COMMIT, OlmoNote::BYTES_MAX).await?;
        let note = json.map(|json| OlmoNote::parse(&json)).transpose();
        Ok(note.map_err(|error| error.in_file(COMMIT, 0))?)
    }

    /// The configuration of the experiment, one JSON object; `None` where there is none. It is
    /// written after the checkpoint counts as complete, so it may be missing in one that does.
    ///
    /// # Errors
    ///
    /// When the storage fails, or the file is no JSON.
    pub async fn config(&self) -> Result<Option<serde_json::Value>, dcp_core::CheckpointError> {
        const NAME: &str = "config.json";
        let Some(json) = self.small(NAME, CONFIG_BYTES_MAX).await? else { return Ok(None) };
        serde_json::from_slice(&json).map(Some).map_err(|error| {
            dcp_core::FormatError::new("configuration", error.to_string()).in_file(NAME, 0).into()
        })
    }

    /// The ranks whose trainer state is there, `train/rank{R}.pt`, ascending. A load takes that of
    /// its own rank, or that of rank 0 where there is none.
    ///
    /// # Errors
    ///
    /// When the storage fails.
    pub async fn train_ranks(&self) -> Result<Vec<u32>, StorageError> {
        let mut ranks = Vec::new();
        let mut files = self.storage.list_files(Some(&Key::new("train")?));
        while let Some(meta) = files.next().await {
            let key = meta?.key;
            let digits =
                key.as_str().strip_prefix("train/rank").and_then(|n| n.strip_suffix(".pt"));
            ranks.extend(digits.and_then(|digits| digits.parse::<u32>().ok()));
        }
        ranks.sort_unstable();
        Ok(ranks)
    }

    /// The trainer's state for `rank`: that of its own file, or of rank 0 where it has none, as
    /// OLMo-core (3.0) does; `None` where there is neither. It is a file of `torch.save`: step
    /// and token counts, data loader, random number generators, callbacks. Nothing in it is
    /// executed.
    ///
    /// # Errors
    ///
    /// When the storage fails; what is wrong with the file is found on the first read.
    pub async fn train(&self, rank: u32) -> Result<Option<TorchSaveReader>, StorageError> {
        for name in [format!("train/rank{rank}.pt"), TRAIN.to_owned()] {
            let key = Key::new(name)?;
            if self.storage.contains(&key).await? {
                return Ok(Some(TorchSaveReader::new(Arc::clone(&self.storage), key)));
            }
        }
        Ok(None)
    }

    async fn contains(&self, name: &str) -> Result<bool, StorageError> {
        self.storage.contains(&Key::new(name)?).await
    }

    async fn small(&self, name: &str, most: u64) -> Result<Option<Vec<u8>>, StorageError> {
        let key = Key::new(name)?;
        let meta = match self.storage.stat(&key).await {
            Ok(meta) => meta,
            Err(error) if error.kind() == StorageErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        if meta.byte_len > most {
            let message = format!("it has {} bytes, more than it can have", meta.byte_len);
            let kind = StorageErrorKind::Invalid;
            let error = StorageError::new(kind, dcp_core::error::StorageOp::Read, Some(key));
            return Err(error.with_message(message));
        }
        Ok(Some(self.storage.read_range(&key, 0..meta.byte_len).await?.to_vec()))
    }
}
