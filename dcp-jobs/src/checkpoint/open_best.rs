//! Opens the checkpoint in a folder that several formats recognize.

use dcp_core::CheckpointError;
use dcp_core::format::{FolderMatch, OpenedCheckpoint, Place};

use crate::checkpoint::opener::Opener;

impl Opener {
    /// Opens the checkpoint in a folder by `best`. Where that finds none of its own, because a file only has a name of
    /// its, another format opens the folder whose index is there; as [`FormatRegistry`](dcp_core::format::FormatRegistry)
    /// does.
    pub(crate) async fn open_best(
        &self,
        best: &FolderMatch,
        place: &Place,
    ) -> (FolderMatch, Result<OpenedCheckpoint, CheckpointError>) {
        let opened = self.open_selected(&*best.format, place).await;
        if matches!(opened, Err(CheckpointError::NotACheckpoint { .. })) {
            for other in self.formats.others(&place.listing().root(), best) {
                if let Ok(found) = self.open_selected(&*other.format, place).await {
                    return (other, Ok(found));
                }
            }
        }
        (best.clone(), opened)
    }
}
