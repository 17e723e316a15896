//! Finds a whole model in a folder of which something else is damaged.

use std::collections::BTreeSet;

use dcp_core::StorageError;
use dcp_core::format::Place;
use dcp_core::storage::ObjectMeta;

use super::SINGLE_NAME;
use super::index_file::INDEX_MAX;
use super::indexed_files::read;
use super::variants::IndexName;
use crate::incomplete_files::first_incomplete;
use crate::indexed_tensors::IndexedTensors;

/// The names under which loaders search for weights in one file.
const SINGLE_NAMES: [&str; 6] = [
    SINGLE_NAME,
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "diffusion_pytorch_model.safetensors",
    "consolidated.safetensors",
];
/// The index of shards of `torch.save`.
const BIN_INDEX: &str = "pytorch_model.bin.index.json";
/// The maximum number of indexes that are read.
const INDEXES_MAX: usize = 8;

/// Whether loaders find whole weights in a folder, by names and lengths, whatever else in it is damaged: a file
/// under a name that they search for, or an index all of whose files are there. It keeps a folder from being deleted
/// as what a dead save left; the checkpoint is not complete for that.
///
/// # Errors
///
/// When the storage fails.
pub async fn model_is_whole(place: &Place) -> Result<bool, StorageError> {
    let (folder, storage) = (place.listing().root(), &**place.storage());
    let is_whole = |files: Vec<ObjectMeta>| async move {
        let unnamed = IndexedTensors::default();
        Ok::<_, StorageError>(first_incomplete(storage, &files, &unnamed).await?.is_none())
    };
    for single in SINGLE_NAMES.iter().filter_map(|name| folder.file(name)) {
        if is_whole(vec![single.clone()]).await? {
            return Ok(true);
        }
    }
    let is_index = |name: &str| {
        name == BIN_INDEX || IndexName::parse(name).is_some_and(|index| index.variant.is_none())
    };
    let indexes: Vec<_> = folder.files().filter(|(name, _)| is_index(name)).collect();
    for (_, meta) in indexes.into_iter().take(INDEXES_MAX) {
        if meta.byte_len > INDEX_MAX {
            continue;
        }
        let Ok(index) = read(place, meta).await? else { continue };
        let named: BTreeSet<&str> = index.files().map(|file| file.as_str()).collect();
        let there: Vec<_> = named.iter().filter_map(|name| folder.file(name)).cloned().collect();
        if !index.is_delta && there.len() == named.len() && is_whole(there).await? {
            return Ok(true);
        }
    }
    Ok(false)
}
