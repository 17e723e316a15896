//! Detects exports that were not written to their end.

use dcp_core::storage::PutMode;
use dcp_core::{Key, Storage, StorageError};
use dcp_formats::hf::UNFINISHED_NAME;
use dcp_jobs::JobError;

use super::Part;

/// The files that say that not all of an export is there: beside each index, and beside several files
/// without one.
pub(super) fn marks(parts: &[Part]) -> Result<Vec<Key>, JobError> {
    let files: usize =
        parts.iter().map(|part| part.files.data.len() + usize::from(part.json.is_some())).sum();
    let mut marks = Vec::new();
    for part in parts {
        let folder = part.files.index.as_ref().and_then(|index| index.as_str().rsplit_once('/'));
        let name = match folder {
            Some((folder, _)) => format!("{folder}/{UNFINISHED_NAME}"),
            None if files > 1 => UNFINISHED_NAME.to_owned(),
            None => continue,
        };
        let key = Key::new(name).map_err(StorageError::from)?;
        if !marks.contains(&key) {
            marks.push(key);
        }
    }
    Ok(marks)
}

/// Puts them there.
pub(super) async fn mark(target: &dyn Storage, marks: &[Key]) -> Result<(), StorageError> {
    for key in marks {
        let content = "An export is being written here, or was not written to its end.\n";
        target.put(key, content.as_bytes().to_vec().into(), PutMode::Overwrite).await?;
    }
    Ok(())
}

/// Removes them.
pub(super) async fn unmark(target: &dyn Storage, marks: &[Key]) -> Result<(), StorageError> {
    for key in marks {
        // All is written, so it is worth another try.
        let key = std::slice::from_ref(key);
        if target.delete(key).await.is_err() {
            target.delete(key).await?;
        }
    }
    Ok(())
}

/// Removes what is there of these files.
pub(super) async fn remove_all(target: &dyn Storage, names: &[Key]) {
    // The error that ends the export says more than this one.
    let _ = target.delete(names).await;
}
