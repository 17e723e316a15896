//! Finds files of an index that are missing or too short.

use dcp_core::format::Place;
use dcp_core::storage::StorageExt as _;
use dcp_core::{Key, StorageError, StorageErrorKind};

use crate::incomplete_files::{LFS_POINTER_MAX, LFS_PROBLEM, is_lfs_pointer};

/// The maximum size of an index that is read for a closer look, in bytes: 300,000 chunks. Of a larger one
/// only the last byte is read.
pub const EXAMINED_INDEX_MAX: u64 = 64 << 20;
/// The maximum number of files to check per index where each takes a request: the storage was not
/// listed.
const REQUESTS_MAX: usize = 1024;

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
            Ok(meta) if meta.byte_len < end => {
                let found = meta.byte_len;
                let is_pointer = found <= LFS_POINTER_MAX
                    && is_lfs_pointer(&place.storage().read_range(file, 0..found).await?);
                self.short.push(match is_pointer {
                    true => format!("{file} {LFS_PROBLEM}"),
                    false => format!("{file} has {found} bytes, the checkpoint needs {end}"),
                });
            }
            Ok(_) => {}
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                self.missing.push(file.to_string());
            }
            Err(error) => return Err(error),
        }
        Ok(place.listing().is_complete() || self.looked_at < REQUESTS_MAX)
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
