//! Files in the folder of a checkpoint that its index does not name.

use std::future::poll_fn;

use dcp_core::storage::{ObjectMeta, StorageExt as _};
use dcp_core::text::counted;
use dcp_core::{CheckpointMetadata, Storage};

/// Files that are looked at.
const LISTED: usize = 100_000;
/// Files that a note names.
const NAMED: usize = 5;

/// Files of a folder by what they are to its checkpoint.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Files of the format that the index does not name.
    pub(crate) stale: Vec<ObjectMeta>,
    /// A file of another format.
    pub(crate) foreign: Option<ObjectMeta>,
}

impl Leftovers {
    /// Lists the folder. `is_data` and `is_foreign` decide by the name of a file. A storage that
    /// cannot list has none.
    pub(crate) async fn find(
        storage: &dyn Storage,
        metadata: &CheckpointMetadata,
        is_data: impl Fn(&ObjectMeta) -> bool,
        is_foreign: impl Fn(&str) -> bool,
    ) -> Self {
        let mut found = Self::default();
        let mut objects = storage.list_files(None);
        for _ in 0..LISTED {
            let next = poll_fn(|context| objects.as_mut().poll_next(context)).await;
            let Some(meta) = next else { break };
            let Ok(meta) = meta else { return Self::default() };
            let name = meta.key.as_str();
            if is_data(&meta) && !metadata.files().contains(&meta.key) {
                found.stale.push(meta);
            } else if is_foreign(name) {
                found.foreign = Some(meta);
            }
        }
        found.stale.sort_by(|a, b| a.key.cmp(&b.key));
        found
    }

    /// The notes to show: `noun` and `what` are of the stale files.
    pub(crate) fn notes(&self, noun: &str, what: &str) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(meta) = &self.foreign {
            notes.push(format!(
                "{} is here, too: it is of another checkpoint or what is left of one",
                meta.key
            ));
        }
        if self.stale.is_empty() {
            return notes;
        }
        let bytes = self.stale.iter().fold(0_u64, |sum, meta| sum.saturating_add(meta.byte_len));
        let names = self.stale.iter().take(NAMED).map(|meta| meta.key.to_string());
        let mut names: Vec<_> = names.collect();
        if self.stale.len() > NAMED {
            names.push(format!("and {} more", self.stale.len() - NAMED));
        }
        let count = counted(self.stale.len() as u64, noun);
        notes.push(format!("{count} of {bytes} bytes{what}: {}", names.join(", ")));
        notes
    }
}
