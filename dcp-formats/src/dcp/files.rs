//! The files of a DCP checkpoint in a folder, by their names.

use std::collections::BTreeSet;

use dcp_core::format::Folder;
use dcp_core::text::counted;

use super::names::Named;

/// Ranks whose files are counted.
pub(super) const RANKS_MAX: usize = 1 << 16;

/// Which of the files of a DCP checkpoint a folder has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DcpFiles {
    /// A `.metadata`.
    pub metadata: bool,
    /// A `.metadata.tmp`, which PyTorch renames in its last step.
    pub metadata_tmp: bool,
    /// A data file, `__0_0.distcp`.
    pub data: bool,
    /// Ranks with a `__{rank}.metadata`, as saves without collectives leave.
    pub ranks: BTreeSet<u32>,
    /// Ranks with a data file.
    pub data_ranks: BTreeSet<u32>,
}

impl DcpFiles {
    /// The files in `folder`, but not those in folders below it.
    #[must_use]
    pub fn of(folder: &Folder<'_>) -> Self {
        let mut found = Self::default();
        folder.files().for_each(|(name, _)| found.add(name));
        found
    }

    /// Notes the name of a file.
    pub(super) fn add(&mut self, name: &str) {
        match Named::parse(name) {
            Some(Named::Metadata) => self.metadata = true,
            Some(Named::MetadataTmp) => self.metadata_tmp = true,
            Some(Named::Data { rank, .. }) => {
                self.data = true;
                if self.data_ranks.len() < RANKS_MAX {
                    self.data_ranks.insert(rank);
                }
            }
            Some(Named::RankMetadata { rank }) if self.ranks.len() < RANKS_MAX => {
                self.ranks.insert(rank);
            }
            _ => {}
        }
    }

    /// Whether there is any of them.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.is_committed() || self.metadata_tmp || self.data
    }

    /// Whether there is an index, so that the save was committed.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.metadata || !self.ranks.is_empty()
    }

    /// The first rank whose own index is lost where others have theirs: ranks are numbered without gaps, and each
    /// writes data files under its number.
    pub(super) fn rank_without_index(&self) -> Option<u32> {
        if self.metadata || self.ranks.is_empty() {
            return None;
        }
        let gap = (0..).zip(&self.ranks).find(|(expected, rank)| expected != *rank);
        gap.map(|(absent, _)| absent)
            .or_else(|| self.data_ranks.difference(&self.ranks).next().copied())
    }

    /// Returns the reason that the checkpoint is incomplete, by its names.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if self.metadata {
            return None;
        }
        if !self.ranks.is_empty() {
            let absent = self.rank_without_index();
            return absent.map(|rank| format!("the metadata of rank {rank} is missing"));
        }
        Some(if self.metadata_tmp {
            "there is a .metadata.tmp but no .metadata: the save died in its last step".to_owned()
        } else {
            "there is no .metadata: the save did not finish".to_owned()
        })
    }

    pub(super) fn description(&self) -> String {
        if self.metadata {
            return "is a PyTorch DCP checkpoint".to_owned();
        }
        if !self.ranks.is_empty() {
            let ranks = counted(self.ranks.len() as u64, "rank");
            return format!("is a PyTorch DCP checkpoint of {ranks} saved without collectives");
        }
        if self.metadata_tmp {
            return "has a .metadata.tmp but no .metadata: a save died before its last step; the \
                    file may be complete, and renaming it to .metadata then completes the checkpoint"
                .to_owned();
        }
        "has data files of a PyTorch DCP checkpoint but no .metadata: the save did not finish"
            .to_owned()
    }
}
