//! How a folder is recognized and opened.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Evidence, Examined, Existing, Folder, FormatInfo, Occupant,
    OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection, RunTracker,
    UnfinishedSave, WriterOptions,
};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Key, Storage, StorageError, StorageReader as _,
    StorageWriter,
};

use crate::names::{INDEX, parse};
use crate::reader::ToyReader;
use crate::writer::ToyWriter;

/// The name of the format.
const NAME: &str = "toy";

/// Folders with an `index.toy`.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToyFormat;

#[async_trait]
impl CheckpointFormat for ToyFormat {
    fn info(&self) -> FormatInfo {
        FormatInfo::new(NAME, "Toy").with_landmarks(&[INDEX])
    }

    fn peeks(&self, _folder: &Folder<'_>) -> Vec<Peek> {
        Vec::new()
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        if folder.has(INDEX) {
            return Some(Recognized::new(Evidence::Index, "is a toy checkpoint"));
        }
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
        name == INDEX || is_data(name)
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        let found = Occupant::Checkpoint("it is a toy checkpoint".to_owned());
        folder.has(INDEX).then_some(found)
    }

    fn target(&self) -> Option<&dyn CheckpointTarget> {
        Some(self)
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

impl CheckpointTarget for ToyFormat {
    fn parts(&self) -> &'static [&'static str] {
        &[NAME]
    }

    fn existing(&self, folder: &Folder<'_>, _metadata: Option<&CheckpointMetadata>) -> Existing {
        match folder.has(INDEX) {
            true => Existing::Checkpoint,
            false if folder.files().any(|(name, _)| is_data(name)) => Existing::Remains,
            false => Existing::Nothing,
        }
    }

    fn compresses(&self) -> bool {
        false
    }

    fn writer(
        &self,
        storage: Arc<dyn Storage>,
        options: &WriterOptions,
    ) -> Result<Arc<dyn StorageWriter>, CheckpointError> {
        Ok(Arc::new(ToyWriter::new(storage, options.overwrite)))
    }
}

/// Whether a file has the name of a data file.
fn is_data(name: &str) -> bool {
    Key::new(name).is_ok_and(|key| parse(&key).is_some())
}
