//! The notes of a save about itself, for people and as JSON.

use std::fmt;

use dcp_core::CheckpointError;
use dcp_core::format::{SaveFacts, SaveRecord};
use dcp_core::text::counted;
use indexmap::IndexMap;
use serde::Serialize;

use crate::source::Source;

/// The sidecar of a checkpoint: a small file of dcp with what the index has no place for. PyTorch
/// writes none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum SidecarSummary {
    /// There is none of this save.
    Absent,
    /// There is one that cannot be read.
    Damaged {
        /// Why.
        problem: String,
    },
    /// Its facts.
    Found(SidecarFacts),
}

/// The facts in a sidecar.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SidecarFacts {
    /// The program that wrote the checkpoint, such as `dcp-formats 0.1.0`.
    pub tool: String,
    /// The number of ranks of the save.
    pub world_size: u32,
    /// The sizes of the dimensions of the device mesh by their names, the outermost first.
    pub mesh: IndexMap<String, u64>,
    /// The step of the training run.
    pub step: Option<u64>,
    /// The step of the checkpoint before.
    pub parent_step: Option<u64>,
    /// The chunks and objects whose CRC-32s are noted.
    pub checksums: Coverage,
    /// The files whose SHA-256 is noted.
    pub digests: Coverage,
}

/// The share of the chosen entries that checksums cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Coverage {
    /// The number of covered entries.
    pub covered: u64,
    /// The number of entries.
    pub of: u64,
}

impl SidecarSummary {
    /// Reads the notes of the save of `source`; `None` for a format whose saves note nothing. The
    /// entries of the metadata that `counted` names by position are those that the checksums are counted
    /// of.
    pub(crate) async fn of(
        source: &Source,
        counted: &[bool],
    ) -> Result<Option<Self>, CheckpointError> {
        let Some(audit) = source.audit() else { return Ok(None) };
        Ok(match audit.save_record(counted).await? {
            Some(SaveRecord::Absent) => Some(Self::Absent),
            Some(SaveRecord::Damaged(problem)) => Some(Self::Damaged { problem }),
            Some(SaveRecord::Found(facts)) => Some(Self::Found(facts.into())),
            _ => None,
        })
    }

    /// The notes, each with a label, for people.
    #[must_use]
    pub fn labelled(&self) -> Vec<(&'static str, String)> {
        let facts = match self {
            Self::Absent => return vec![("Sidecar", "none".to_owned())],
            Self::Damaged { problem } => {
                return vec![("Sidecar", format!("cannot be read: {problem}"))];
            }
            Self::Found(facts) => facts,
        };
        let mut labelled = vec![("Written by", facts.tool.clone())];
        labelled.push(("World size", facts.world_size.to_string()));
        if !facts.mesh.is_empty() {
            labelled.push(("Mesh", facts.mesh()));
        }
        labelled.extend(facts.step.map(|step| ("Step", step.to_string())));
        labelled.extend(facts.parent_step.map(|step| ("Parent step", step.to_string())));
        labelled.push(("Sidecar", facts.coverage().join(", ")));
        labelled
    }
}

impl SidecarFacts {
    /// The dimensions of the device mesh, as `dp=2 tp=4`.
    fn mesh(&self) -> String {
        let mesh: Vec<_> = self.mesh.iter().map(|(name, size)| format!("{name}={size}")).collect();
        mesh.join(" ")
    }

    fn coverage(&self) -> Vec<String> {
        let mut parts = vec![format!("CRC-32 of {}", self.checksums.named("item"))];
        if self.digests.covered > 0 {
            parts.push(format!("SHA-256 of {}", self.digests.named("file")));
        }
        parts
    }
}

impl Coverage {
    fn named(self, noun: &str) -> String {
        let all = counted(self.of, noun);
        if self.covered == self.of { all } else { format!("{} of {all}", self.covered) }
    }
}

impl From<SaveFacts> for SidecarFacts {
    fn from(facts: SaveFacts) -> Self {
        Self {
            tool: facts.tool,
            world_size: facts.world_size,
            mesh: facts.mesh.into_iter().collect(),
            step: facts.step,
            parent_step: facts.parent_step,
            checksums: Coverage { covered: facts.items_with_checksum, of: facts.items },
            digests: Coverage { covered: facts.files_with_digest, of: facts.files },
        }
    }
}

impl fmt::Display for SidecarSummary {
    /// One line: `sidecar of dcp-formats 0.1.0 · 4 ranks (dp=2 tp=2) · step 20 after 10 · CRC-32 of 56
    /// items`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let facts = match self {
            Self::Absent => return f.write_str("no sidecar of dcp"),
            Self::Damaged { problem } => return write!(f, "sidecar cannot be read: {problem}"),
            Self::Found(facts) => facts,
        };
        write!(f, "sidecar of {} · {}", facts.tool, counted(facts.world_size.into(), "rank"))?;
        if !facts.mesh.is_empty() {
            write!(f, " ({})", facts.mesh())?;
        }
        match (facts.step, facts.parent_step) {
            (Some(step), Some(parent)) => write!(f, " · step {step} after {parent}")?,
            (Some(step), None) => write!(f, " · step {step}")?,
            (None, _) => {}
        }
        facts.coverage().iter().try_for_each(|part| write!(f, " · {part}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sidecar_without_some_checksums_says_how_many_it_has() {
        let mut facts = SaveFacts::default();
        (facts.tool, facts.world_size) = ("dcp-formats 9".to_owned(), 4);
        (facts.items, facts.items_with_checksum) = (56, 50);
        (facts.files, facts.files_with_digest) = (4, 4);
        let mut found = SidecarSummary::Found(facts.clone().into());
        let shown =
            "sidecar of dcp-formats 9 · 4 ranks · CRC-32 of 50 of 56 items · SHA-256 of 4 files";
        assert_eq!(found.to_string(), shown);
        let labels: Vec<_> = found.labelled().into_iter().map(|(label, _)| label).collect();
        assert_eq!(labels, ["Written by", "World size", "Sidecar"]);
        facts.step = Some(20);
        found = SidecarSummary::Found(facts.into());
        assert!(found.to_string().contains(" · step 20 · "), "{found}");
    }
}
