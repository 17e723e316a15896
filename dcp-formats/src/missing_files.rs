//! Finds files of an index that are missing or too short.

use dcp_core::format::Place;
use dcp_core::{Key, StorageError, StorageErrorKind};

/// The maximum number of files to check per index.
const FILES_MAX: usize = 1024;

/// Files of an index that are missing or too short.
#[derive(Debug, Default)]
pub(crate) struct MissingFiles {
    looked_at: usize,
    missing: Vec<String>,
    short: Vec<String>,
}

impl MissingFiles {
    /// Checks that `file` has at least `end` bytes. Returns whether to check further files.
    pub(crate) async fn look(
        &mut self,
        place: &Place,
        file: &Key,
        end: u64,
    ) -> Result<bool, StorageError> {
        self.looked_at += 1;
        match place.storage().stat(file).await {
            Ok(meta) if meta.byte_len < end => self
                .short
                .push(format!("{file} has {} bytes, the checkpoint needs {end}", meta.byte_len)),
            Ok(_) => {}
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                self.missing.push(file.to_string());
            }
            Err(error) => return Err(error),
        }
        Ok(self.looked_at < FILES_MAX)
    }

    /// The problem, if there is one.
    pub(crate) fn problem(&self) -> Option<String> {
        match (&*self.missing, &*self.short) {
            ([], []) => None,
            (missing, _) if missing.len() == self.looked_at && missing.len() > 1 => {
                Some("there are no data files".to_owned())
            }
            ([file], _) => Some(format!("{file} is missing")),
            ([file, others @ ..], _) => {
                Some(format!("{file} is missing, and so are {} more", others.len()))
            }
            ([], [problem]) => Some(problem.clone()),
            ([], [problem, others @ ..]) => {
                Some(format!("{problem}; {} more are too short", others.len()))
            }
        }
    }
}
