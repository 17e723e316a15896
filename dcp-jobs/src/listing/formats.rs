//! The formats that this crate opens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointFormat, CheckpointTarget, Examined, Folder, FormatInfo, FormatRegistry, Occupant,
    OpenOptions, OpenedCheckpoint, Peek, Place, Recognized, RunSelection, RunTracker,
    UnfinishedSave,
};
use dcp_core::storage::StorageExt;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, Key, Storage, StorageError};
use dcp_formats::hf::forgotten_shard;
use dcp_formats::incomplete_files::{LFS_PROBLEM, is_lfs_pointer};
use dcp_formats::torch_save::TorchSaveFormat;
use serde::Deserialize;

use crate::options::JobOptions;
use crate::source::Source;
use crate::view::{Duplicates, Merged};

/// Bytes of an index that are read at most.
const INDEX_MAX: u64 = 64 << 20;
/// The most files that an index may name.
const FILES_MAX: usize = 1 << 14;

/// The formats of [`dcp_formats::formats`], of which `torch.save` also opens models in several files.
/// Those of frameworks are registered in addition.
#[must_use]
pub fn formats() -> FormatRegistry {
    dcp_formats::formats().with(Arc::new(TorchSaveFolders(TorchSaveFormat)))
}

/// Describes a folder without a checkpoint, as a message.
pub(crate) async fn explain(storage: &Arc<dyn Storage>) -> Result<String, StorageError> {
    let formats = formats();
    Ok(formats.explain(&formats.look(storage).await?.listing().root()))
}

/// `torch.save`, with models in several files, which an index names.
#[derive(Debug)]
struct TorchSaveFolders(TorchSaveFormat);

/// The problem of an index without a tensor, as the predicate of a sentence.
const NAMES_NOTHING: &str = "names no tensor";

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The problem of an index, as the predicate of a sentence: it cannot be read, or names a file that is not
/// in its folder.
fn missing_file(folder: &Folder<'_>, json: &[u8]) -> Option<String> {
    match serde_json::from_slice::<Index>(json) {
        Ok(Index { weight_map }) if weight_map.is_empty() => Some(NAMES_NOTHING.to_owned()),
        Ok(Index { weight_map }) => {
            match forgotten_shard(weight_map.values().map(|file| &**file)) {
                Some(shard) => {
                    Some(format!("names no {shard:?}, which the names of its other files count"))
                }
                None => {
                    let missing = weight_map.into_values().find(|file| !folder.has(file))?;
                    Some(format!("names {missing:?}, which is missing"))
                }
            }
        }
        Err(_) if is_lfs_pointer(json) => Some(LFS_PROBLEM.to_owned()),
        Err(error) => Some(format!("cannot be read: {error}")),
    }
}

/// The model in the files that an index names.
async fn open_indexed(
    place: &Place,
    index_file: &Key,
    options: &OpenOptions,
) -> Result<Source, CheckpointError> {
    let storage = place.storage();
    let bad = |problem: String| {
        let error = FormatError::new("index of a model", problem);
        CheckpointError::from(error.in_file(index_file.as_str(), 0))
    };
    let len = storage.stat(index_file).await?.byte_len;
    if len > INDEX_MAX {
        return Err(bad(format!("it has {len} bytes, more than an index has")));
    }
    let json = storage.read_range(index_file, 0..len).await?;
    let index: Index = serde_json::from_slice(&json).map_err(|error| bad(error.to_string()))?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    if files.is_empty() {
        return Err(bad(format!("it {NAMES_NOTHING}")));
    }
    if files.len() > FILES_MAX {
        return Err(bad(format!("it names {} files, too many", files.len())));
    }
    let mut parts = Vec::with_capacity(files.len());
    for file in files {
        let named = Key::new(file.as_str()).map_err(|error| bad(error.to_string()))?;
        if !storage.contains(&named).await? {
            return Err(bad(format!("{file:?}, which it names, is not there")));
        }
        let one = Place::file_of(storage, named);
        parts.push(Source::from(TorchSaveFormat.open(&one, options).await?));
    }
    let whole = Merged::apply(&parts, Duplicates::Identical, &JobOptions::default()).await;
    let whole = whole.map_err(|error| match error {
        crate::error::JobError::Checkpoint(error) => error,
        other => CheckpointError::Plugin(Box::new(other)),
    })?;
    let metadata = whole.metadata().await?;
    if let Some((name, file)) = index.weight_map.iter().find(|(n, _)| metadata.get(n).is_none()) {
        return Err(bad(format!("{name:?}, which it has in {file:?}, is not there")));
    }
    Ok(whole)
}

#[async_trait]
impl CheckpointFormat for TorchSaveFolders {
    fn info(&self) -> FormatInfo {
        self.0.info()
    }

    fn peeks(&self, folder: &Folder<'_>) -> Vec<Peek> {
        self.0.peeks(folder)
    }

    fn recognize(&self, folder: &Folder<'_>) -> Option<Recognized> {
        self.0.recognize(folder)
    }

    fn recognize_file(&self, name: &str, head: &[u8]) -> bool {
        self.0.recognize_file(name, head)
    }

    async fn examine(&self, place: &Place) -> Result<Examined, StorageError> {
        let examined = self.0.examine(place).await?;
        if place.has_known_files() {
            return Ok(examined);
        }
        let folder = place.listing().root();
        for variant in TorchSaveFormat::models(&folder) {
            let name = TorchSaveFormat::index_file(variant.as_deref());
            // Loaders read the single file, whatever an index says.
            let single = TorchSaveFormat::model_file(variant.as_deref());
            let Some(index) = folder.file(&name).filter(|_| !folder.has(&single)) else { continue };
            let problem = if index.byte_len > INDEX_MAX {
                Some(format!("has {} bytes, more than an index has", index.byte_len))
            } else {
                let json = place.storage().read_range(&index.key, 0..index.byte_len).await?;
                missing_file(&folder, &json)
            };
            if let Some(problem) = problem {
                return Ok(Examined::new(Some(format!("the {name} {problem}"))));
            }
        }
        Ok(examined)
    }

    async fn tracker(&self, run: &Place) -> Result<Option<RunTracker>, StorageError> {
        self.0.tracker(run).await
    }

    async fn select(&self, run: &Place) -> Result<Option<RunSelection>, StorageError> {
        self.0.select(run).await
    }

    fn unfinished(
        &self,
        folder: &Folder<'_>,
        metadata: &CheckpointMetadata,
    ) -> Option<UnfinishedSave> {
        self.0.unfinished(folder, metadata)
    }

    fn owns(&self, folder: &Folder<'_>, name: &str) -> bool {
        self.0.owns(folder, name)
    }

    fn occupant(&self, folder: &Folder<'_>) -> Option<Occupant> {
        self.0.occupant(folder)
    }

    fn target(&self) -> Option<&dyn CheckpointTarget> {
        self.0.target()
    }

    async fn open(
        &self,
        place: &Place,
        options: &OpenOptions,
    ) -> Result<OpenedCheckpoint, CheckpointError> {
        // Of a folder without the main model, the first variant is the model.
        let first = || TorchSaveFormat::models(&place.listing().root()).pop_first().flatten();
        let variant = options.variant.clone().or_else(first);
        let variant = variant.as_deref();
        let options = &options.clone().with_variant(variant.map(ToOwned::to_owned));
        let key = |name: String| Key::new(name).map_err(StorageError::from);
        let (file, index) = (
            key(TorchSaveFormat::model_file(variant))?,
            key(TorchSaveFormat::index_file(variant))?,
        );
        let storage = place.storage();
        if place.file().is_some() || storage.contains(&file).await? {
            return self.0.open(place, options).await;
        }
        if !storage.contains(&index).await? {
            let message = format!("there is neither {file} nor {index}");
            return Err(CheckpointError::NotACheckpoint { message });
        }
        let source = Arc::new(open_indexed(place, &index, options).await?);
        let opened = OpenedCheckpoint::new(Arc::clone(storage), Arc::clone(&source.reader));
        Ok(opened.with_extension(source))
    }
}
