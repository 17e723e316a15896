//! Finds a whole model in a folder of which something else is damaged.

use std::collections::BTreeSet;

use dcp_core::StorageError;
use dcp_core::format::{Folder, Place};
use dcp_core::storage::ObjectMeta;

use super::complete::{forgotten_shard, series};
use super::index_file::{INDEX_MAX, INDEX_NAME};
use super::indexed_files::{indexed_tensors, read};
use super::variants::{IndexName, without_variants};
use super::{ENDING, SINGLE_NAME};
use crate::incomplete_files::first_incomplete;
use crate::indexed_tensors::IndexedTensors;

/// The model of `torch.save`, and the index of its shards.
const BIN_NAME: &str = "pytorch_model.bin";
const BIN_INDEX: &str = "pytorch_model.bin.index.json";
/// The names under which loaders search for weights in one file.
const SINGLE_NAMES: [&str; 6] = [
    SINGLE_NAME,
    BIN_NAME,
    "adapter_model.safetensors",
    "adapter_model.bin",
    "diffusion_pytorch_model.safetensors",
    "consolidated.safetensors",
];
/// The maximum number of indexes that are read.
const INDEXES_MAX: usize = 8;

/// The weights of a folder that [`model_is_whole`] compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Weights {
    /// All weights of the model that this crate opens, and every tensor that their index places in them; variants
    /// of the model are left out.
    Main,
    /// Any weights that a loader finds by their names: one file, or an index all of whose files are there.
    Any,
}

/// Whether weights in a folder are whole, whatever else in it is damaged. It keeps a folder from being deleted
/// as what a dead save left; the checkpoint is not complete for that.
///
/// # Errors
///
/// When the storage fails.
pub async fn model_is_whole(place: &Place, weights: Weights) -> Result<bool, StorageError> {
    let folder = place.listing().root();
    let (main, _) = main_and_variants(&folder, place);
    if weights == Weights::Main && !main.is_empty() {
        let is_there = match folder.file(INDEX_NAME) {
            // Of a series without an index nothing says which tensors it has.
            None => main.iter().all(|meta| series(meta.key.file_name()).is_none()),
            Some(index) => indexed_shards(place, index).await?.is_some(),
        };
        return Ok(is_there && are_whole(place, &main, &indexed_tensors(place).await?).await?);
    }
    let singles = match weights {
        Weights::Main => &[BIN_NAME][..],
        Weights::Any => &SINGLE_NAMES,
    };
    let unnamed = &IndexedTensors::default();
    for single in singles.iter().filter_map(|name| folder.file(name)) {
        if are_whole(place, std::slice::from_ref(single), unnamed).await? {
            return Ok(true);
        }
    }
    let is_main = |name: &str| IndexName::parse(name).is_some_and(|index| index.variant.is_none());
    let is_index = |name: &str| name == BIN_INDEX || weights == Weights::Any && is_main(name);
    let indexes: Vec<_> = folder.files().filter(|(name, _)| is_index(name)).collect();
    for (_, index) in indexes.into_iter().take(INDEXES_MAX) {
        if let Some(shards) = indexed_shards(place, index).await?
            && are_whole(place, &shards, unnamed).await?
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a folder has variants of a model.
#[must_use]
pub fn has_variants(place: &Place) -> bool {
    let folder = place.listing().root();
    let is_index = |name: &str| IndexName::parse(name).is_some_and(|index| index.variant.is_some());
    main_and_variants(&folder, place).1 || folder.files().any(|(name, _)| is_index(name))
}

/// The safetensors files of a folder that are of the model itself, and whether others are of variants.
fn main_and_variants(folder: &Folder<'_>, place: &Place) -> (Vec<ObjectMeta>, bool) {
    let weights = folder.files().filter(|(name, _)| name.ends_with(ENDING));
    let keys = weights.map(|(_, meta)| meta.key.clone()).collect();
    let (main, variants) = without_variants(keys);
    let main = main.iter().filter_map(|key| place.listing().get(key).cloned());
    (main.collect(), !variants.is_empty())
}

async fn are_whole(
    place: &Place,
    files: &[ObjectMeta],
    tensors: &IndexedTensors,
) -> Result<bool, StorageError> {
    Ok(first_incomplete(&**place.storage(), files, tensors).await?.is_none())
}

/// The files of an index; `None` where one of them is missing, or the index cannot be used.
async fn indexed_shards(
    place: &Place,
    index: &ObjectMeta,
) -> Result<Option<Vec<ObjectMeta>>, StorageError> {
    if index.byte_len > INDEX_MAX {
        return Ok(None);
    }
    let Ok(index) = read(place, index).await? else { return Ok(None) };
    let folder = place.listing().root();
    let named: BTreeSet<&str> = index.files().map(|file| file.as_str()).collect();
    let there = named.iter().map(|name| folder.file(name).cloned()).collect();
    let forgets = forgotten_shard(named.iter().copied()).is_some();
    Ok(if index.is_delta || forgets { None } else { there })
}
