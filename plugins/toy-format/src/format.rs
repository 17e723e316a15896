//! How a folder is recognized and opened.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointFormat, Evidence, Examined, Folder, FormatInfo, OpenOptions, OpenedCheckpoint, Peek,
    Place, Recognized, RunSelection, RunTracker, UnfinishedSave,
};
use dcp_core::{CheckpointError, CheckpointMetadata, Key, StorageError, StorageReader as _};

use crate::names::{INDEX, parse};
use crate::reader::ToyReader;

/// Folders with an `index.toy`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToyFormat;

#[async_trait]
impl CheckpointFormat for ToyFormat {
    fn info(&self) -> FormatInfo {
        FormatInfo::new("toy", "Toy").with_landmarks(&[INDEX])
    }

    fn peeks(&self, _folder: &Folder<'_>) -> Vec<Peek> {
        Vec::new()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        if folder.has(INDEX) {
            return Some(Recognized::new(Evidence::Index, "is a toy checkpoint"));
        }
        let is_data = |name: &str| Key::new(name).is_ok_and(|key| parse(&key).is_some());
        folder.files().any(|(name, _)| is_data(name)).then(|| {
            let problem = format!("there is no {INDEX}: the save did not finish");
            Recognized::new(Evidence::Remains, "has data files of a toy checkpoint and no index")
                .with_problem(Some(problem))
        })
    }

    fn recognize_file(&self, _name: &str, _head: &[u8]) -> bool {
        false
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        match ToyReader::new(Arc::clone(place.storage())).metadata().await {
            Ok(_) => Ok(Examined::default()),
            Err(CheckpointError::Storage(error)) => Err(error),
            Err(error) => Ok(Examined::new(Some(error.to_string()))),
        }
    }

    async fn tracker(&self, _run: &Place) -> Result<Option<RunTracker>, StorageError> {
        Ok(None)
    }

    async fn select(&self, _run: &Place) -> Result<Option<RunSelection>, StorageError> {
        Ok(None)
    }

    fn unfinished(
        &self,
        _folder: &Folder<'_>,
        _metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        None
    }

    fn owns(&self, _folder: &Folder<'_>, name: &str) -> bool {
        name == INDEX || Key::new(name).is_ok_and(|key| parse(&key).is_some())
    }

    async fn open(
        &self,
        place: &Place,
        _options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        let reader = Arc::new(ToyReader::new(Arc::clone(place.storage())));
        reader.metadata().await?;
        let opened = OpenedCheckpoint::new(Arc::clone(place.storage()), Arc::clone(&reader) as _);
        Ok(opened.with_audit(reader))
    }
}
