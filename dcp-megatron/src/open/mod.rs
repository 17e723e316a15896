//! Opens a checkpoint, or the latest checkpoint of a run.

mod backend;
pub(crate) mod checkpoint;
pub(crate) mod common_state;
mod examine;
mod flattened;
pub(crate) mod format;
pub(crate) mod legacy;
pub(crate) mod logical_view;
pub(crate) mod run;
mod select;
pub mod strategy;
mod zarr;

use std::sync::Arc;

use dcp_core::{CheckpointError, Storage};

use crate::disk::config::{CheckpointingConfig, METADATA_JSON};
use crate::disk::tracker::TRACKER;
use crate::error::MegatronError;
use crate::open::checkpoint::{MegatronCheckpoint, MegatronOpenOptions};
use crate::open::format::formats;
use crate::open::run::MegatronRun;

impl MegatronCheckpoint {
    /// Opens the checkpoint in a folder, or of the folder of a run the one that Megatron-LM would
    /// load: that which the tracker names, or the last complete one where that is not. No tensor
    /// is read.
    ///
    /// # Errors
    ///
    /// [`MegatronError::NotACheckpoint`] when there is no `metadata.json`, by which Megatron-Core
    /// alone has its checkpoints, or its content is wrong;
    /// [`MegatronError::UnknownBackend`] for formats that are not known here and that no strategy
    /// in `options` is registered for; those of that strategy;
    /// [`MegatronError::Tracker`] when a run's tracker cannot be parsed; when the index or the
    /// common state cannot be read, unless `options` are tolerant.
    pub async fn open(
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
    ) -> Result<Self, MegatronError> {
        // To look for folders of ranks is to list all iterations of a run, which its tracker saves.
        let run = MegatronRun::new(Arc::clone(storage));
        let config = match CheckpointingConfig::read(&**storage).await {
            // A file of another program.
            Err(CheckpointError::Format(_)) => None,
            config => config?,
        };
        if config.is_none()
            && let Ok(Some(tracked)) = run.tracked().await
        {
            match Self::open_folder(&run.checkpoint(tracked)?, options).await {
                Err(MegatronError::NotACheckpoint { .. }) => {}
                opened => return opened.map(|opened| opened.of_run(tracked, None)),
            }
        }
        match Self::open_folder(storage, options).await {
            Err(MegatronError::NotACheckpoint { message }) => {
                let formats = formats();
                let place = formats.look(storage).await?;
                let folder = place.listing().root();
                let is_any = folder.has(METADATA_JSON) || folder.has(".metadata");
                let message = if is_any { message } else { formats.explain(&folder) };
                Self::open_run(storage, options, message).await
            }
            opened => opened,
        }
    }

    /// Opens the latest checkpoint of a run; fails with `message` when it is none.
    async fn open_run(
        storage: &Arc<dyn Storage>,
        options: &MegatronOpenOptions,
        message: String,
    ) -> Result<Self, MegatronError> {
        let run = MegatronRun::new(Arc::clone(storage));
        let mut warning = None;
        if let Some(tracked) = run.tracked().await? {
            match Self::open_folder(&run.checkpoint(tracked)?, options).await {
                Err(MegatronError::NotACheckpoint { message }) => {
                    warning = Some(format!("{TRACKER} says {tracked}, but that is {message}"));
                }
                opened => return opened.map(|opened| opened.of_run(tracked, None)),
            }
        }
        let Some(latest) = run.latest().await? else {
            let message = warning.unwrap_or(message);
            return Err(MegatronError::NotACheckpoint { message });
        };
        let warning = warning.map(|tracked| format!("{tracked}; {} is opened", latest.entry.name));
        let opened = Self::open_folder(&run.checkpoint(latest.which)?, options).await?;
        Ok(opened.of_run(latest.which, warning))
    }
}
