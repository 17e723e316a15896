//! Renames the files of a checkpoint's index.

use super::{CheckpointMetadata, FileId};
use crate::names::key::Key;

impl CheckpointMetadata {
    /// Renames every file; placements keep referring to the same files.
    ///
    /// # Errors
    ///
    /// The first error of `rename`.
    pub fn rename_files<E>(
        &mut self,
        mut rename: impl FnMut(&Key) -> Result<Key, E>,
    ) -> Result<(), E> {
        let files: Vec<Key> = self.files.iter().map(&mut rename).collect::<Result<_, E>>()?;
        self.file_ids = files
            .iter()
            .enumerate()
            .filter_map(|(index, key)| Some((key.clone(), FileId::from_index(index)?)))
            .collect();
        self.files = files;
        Ok(())
    }
}
