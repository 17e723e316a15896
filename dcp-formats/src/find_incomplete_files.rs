//! Finds the incomplete files of a checkpoint, with what its indexes place in them.

use dcp_core::format::Place;
use dcp_core::storage::ObjectMeta;
use dcp_core::{Key, StorageError};

#[cfg(feature = "hf")]
use crate::hf::indexed_tensors;
use crate::incomplete_files::{IncompleteFile, incomplete_among, is_named};
use crate::indexed_tensors::IndexedTensors;

/// The maximum number of files to read in one checkpoint.
const FILES_MAX: usize = 1 << 12;

/// Finds the files of safetensors and `torch.save` at `place` and below that were cut short, have bytes
/// after their end, were never written, or are pointers of Git LFS, and files of safetensors whose tensors
/// overlap, leave gaps, or are not those that the index in the folder places there. Reads headers and
/// directories, no tensor; at most 4096 files. Files that are [known](Place::known_files) are skipped.
///
/// # Errors
///
/// When the storage fails.
pub async fn find_incomplete_files(place: &Place) -> Result<Vec<IncompleteFile>, StorageError> {
    find_incomplete_files_where(place, |_| true).await
}

/// Finds incomplete files as [`find_incomplete_files`] does, of those for which `is_wanted` is true.
///
/// # Errors
///
/// When the storage fails.
pub async fn find_incomplete_files_where(
    place: &Place,
    is_wanted: impl Fn(&Key) -> bool,
) -> Result<Vec<IncompleteFile>, StorageError> {
    let storage = &**place.storage();
    let tensors = match place.file() {
        None if !place.has_known_files() => indexed_tensors(place).await?,
        _ => IndexedTensors::default(),
    };
    let files: Vec<ObjectMeta> = match place.file() {
        Some(file) => vec![storage.stat(file).await?],
        None => {
            let of_checkpoint = |key| is_named(key) || tensors.has_file(key);
            let named = place.listing().objects().iter().filter(|meta| of_checkpoint(&meta.key));
            let named = named.filter(|meta| !place.is_known(&meta.key) && is_wanted(&meta.key));
            named.take(FILES_MAX).cloned().collect()
        }
    };
    incomplete_among(storage, &files, place.file().is_some(), &tensors).await
}

/// The tensors of no index: only folders of Hugging Face have some.
#[cfg(not(feature = "hf"))]
async fn indexed_tensors(_: &Place) -> Result<IndexedTensors, StorageError> {
    Ok(IndexedTensors::default())
}
