//! Compares the indexes of a folder with the files that they name.

use std::collections::BTreeSet;

use dcp_core::format::{Examined, Folder, Place};
use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::{Key, StorageError, StorageErrorKind};

use super::complete::{forgotten_shard, series};
use super::index_file::{INDEX_NAME, IndexFile, NAMES_NOTHING};
use super::other_program::IS_DELTA;
use super::variants::IndexName;
use crate::incomplete_files::{LFS_PROBLEM, first_incomplete, is_lfs_pointer};
use crate::indexed_tensors::IndexedTensors;
use crate::missing_files::{EXAMINED_INDEX_MAX, MissingFiles};

/// The maximum number of indexes that are read in one folder.
const INDEXES_MAX: usize = 64;

/// Compares every index of a folder with its files. A folder may have several: a model and variants of it,
/// such as `model.safetensors.index.fp16.json`, each of which a program may load. Loaders prefer the model in
/// one file to an index of the same model, unless the index names that file.
pub(super) async fn examine_indexes(place: &Place) -> Result<Examined, StorageError> {
    let folder = place.listing().root();
    let all = folder.files().filter_map(|(name, meta)| Some((IndexName::parse(name)?, name, meta)));
    let all: Vec<_> = all.take(INDEXES_MAX).collect();
    let mut named = BTreeSet::new();
    for (index, name, meta) in &all {
        if meta.byte_len >= EXAMINED_INDEX_MAX {
            return Ok(Examined::default());
        }
        let read = read(place, meta).await?;
        if is_ignored(&folder, index, read.as_ref().ok()) {
            continue;
        }
        let read = match read {
            Ok(read) => read,
            Err(problem) => return Ok(Examined::new(Some(format!("the {name} {problem}")))),
        };
        if read.is_delta {
            return Ok(Examined::of_other_program(IS_DELTA));
        }
        if let Some(problem) = forgets(name, &read) {
            return Ok(Examined::new(Some(problem)));
        }
        let files: BTreeSet<&Key> = read.files().collect();
        let mut missing = MissingFiles::default();
        for file in &files {
            if !missing.look(place, file, 0).await? {
                break;
            }
        }
        if let Some(problem) = missing.problem() {
            return Ok(Examined::new(Some(problem)));
        }
        named.extend(files.into_iter().map(|file| file.as_str().to_owned()));
    }
    let main: Vec<_> = all.iter().filter(|(index, ..)| index.variant.is_none()).collect();
    if let [(_, first, _), (_, second, _), ..] = &*main
        && !folder.has(INDEX_NAME)
    {
        let description = format!("has {first:?} and {second:?}: read one of them by its name");
        return Ok(Examined::of_other_program(description));
    }
    // Shards that have lost their index, of a model with an index of another variant.
    for (name, _) in folder.files().filter(|(name, _)| !named.contains(*name)) {
        let Some((series, _)) = series(name) else { continue };
        let own = match series.untagged().rsplit_once('.') {
            Some((model, variant)) => IndexName { model, variant: Some(variant) },
            None => IndexName { model: series.untagged(), variant: None },
        };
        let is_of_model = all.iter().any(|(index, ..)| index.model == own.model);
        let has_own = all.iter().any(|(index, ..)| *index == own) || folder.has(&own.single());
        if is_of_model && !has_own {
            let problem = format!("there is no {own}, which the name of {name} promises");
            return Ok(Examined::new(Some(problem)));
        }
    }
    Ok(Examined::default())
}

/// Whether loaders prefer the model in one file to this index.
fn is_ignored(folder: &Folder<'_>, name: &IndexName<'_>, index: Option<&IndexFile>) -> bool {
    let single = name.single();
    let names_it = index.is_some_and(|index| index.files().any(|file| file.as_str() == single));
    folder.has(&single) && !names_it
}

/// The tensors that the indexes of a folder place in its files. Indexes that cannot be read are left to
/// [`examine_indexes`]; all together have at most [`EXAMINED_INDEX_MAX`] bytes.
pub(crate) async fn indexed_tensors(place: &Place) -> Result<IndexedTensors, StorageError> {
    let folder = place.listing().root();
    let (mut tensors, mut left) = (IndexedTensors::default(), EXAMINED_INDEX_MAX);
    let all = folder.files().filter_map(|(name, meta)| Some((IndexName::parse(name)?, meta)));
    for (name, meta) in all.take(INDEXES_MAX).collect::<Vec<_>>() {
        let Some(rest) = left.checked_sub(meta.byte_len) else { break };
        left = rest;
        if let Ok(index) = read(place, meta).await?
            && !index.is_delta
            && !is_ignored(&folder, &name, Some(&index))
        {
            tensors.add(&meta.key, index.weight_map);
        }
    }
    Ok(tensors)
}

/// Compares one index, which is opened by its name, with its files.
pub(super) async fn examine_index_file(
    place: &Place,
    file: &Key,
) -> Result<Examined, StorageError> {
    if IndexName::parse(file.file_name()).is_none() {
        return Ok(Examined::default());
    }
    let storage = place.storage();
    let meta = storage.stat(file).await?;
    if meta.byte_len >= EXAMINED_INDEX_MAX {
        return Ok(Examined::default());
    }
    let read = match read(place, &meta).await? {
        Ok(read) => read,
        Err(problem) => return Ok(Examined::new(Some(format!("{file} {problem}")))),
    };
    if let Some(problem) = forgets(file.as_str(), &read) {
        return Ok(Examined::new(Some(problem)));
    }
    let folder = file.as_str().strip_suffix(file.file_name()).unwrap_or_default();
    let mut found = Vec::new();
    for named in read.files() {
        let named = Key::new(format!("{folder}{named}"))?;
        match storage.stat(&named).await {
            Ok(meta) => found.push(meta),
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                return Ok(Examined::new(Some(format!("{named} is missing"))));
            }
            Err(error) => return Err(error),
        }
    }
    let mut tensors = IndexedTensors::default();
    tensors.add(file, read.weight_map);
    Ok(Examined::new(first_incomplete(&**storage, &found, &tensors).await?))
}

/// The problem of the index `name`, if it [forgets a shard](forgotten_shard).
fn forgets(name: &str, index: &IndexFile) -> Option<String> {
    let forgotten = forgotten_shard(index.files().map(Key::as_str))?;
    Some(format!("the {name} names no {forgotten:?}, which the names of its other files count"))
}

/// Reads an index; what is wrong with it is the predicate of a sentence.
pub(super) async fn read(
    place: &Place,
    meta: &ObjectMeta,
) -> Result<Result<IndexFile, String>, StorageError> {
    let bytes = place.storage().read_range(&meta.key, 0..meta.byte_len).await?;
    Ok(match IndexFile::parse(&bytes) {
        Ok(index) if index.weight_map.is_empty() && !index.is_delta => {
            Err(NAMES_NOTHING.to_owned())
        }
        Ok(index) => Ok(index),
        Err(_) if is_lfs_pointer(&bytes) => Err(LFS_PROBLEM.to_owned()),
        Err(error) => Err(format!("cannot be read: {}", error.problem())),
    })
}
