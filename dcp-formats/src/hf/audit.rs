//! Checks of a folder of safetensors files besides those of its tensors.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointAudit, ChunkChecksum, Findings, FoundKind, FoundProblem, IndexFacts, RecordAudit,
    SaveRecord,
};
use dcp_core::storage::ObjectMeta;
use dcp_core::{CheckpointError, CheckpointMetadata, StorageReader as _};

use super::finding::{Finding, FindingKind};
use super::reader::HfReader;
use crate::leftovers::Leftovers;

/// Whether a file holds tensors, or is an index of DCP that was not renamed.
fn is_data(meta: &ObjectMeta) -> bool {
    let name = meta.key.as_str();
    name.ends_with(super::ENDING) && meta.byte_len > 0 || name.ends_with(".metadata.tmp")
}

fn problem(finding: &Finding) -> FoundProblem {
    let kind = match finding.kind {
        FindingKind::MissingFile | FindingKind::MissingIndex => FoundKind::MissingFile,
        FindingKind::ShortFile => FoundKind::ShortFile,
        FindingKind::SharedBytes => FoundKind::SharedBytes,
        FindingKind::Header | FindingKind::ExtraBytes => FoundKind::Corrupt,
        _ => FoundKind::Index,
    };
    FoundProblem::new(kind, finding.message.clone())
        .with_key(finding.fqn.clone())
        .with_file(finding.file.clone())
}

#[async_trait]
impl CheckpointAudit for HfReader {
    async fn findings(&self) -> Result<Findings, CheckpointError> {
        let metadata = self.metadata().await?;
        let mut notes = Vec::new();
        // A single file says nothing of the folder that it is in.
        if metadata.provenance().format.as_deref() == Some("hf") {
            let is_foreign = |name: &str| name.ends_with(".distcp");
            let left = Leftovers::find(&**self.storage(), &metadata, is_data, is_foreign).await;
            notes = left.notes("file", " that the index does not name");
        }
        let problems = self.findings().await?.iter().map(problem).collect();
        notes.extend(self.notes().await?.iter().cloned());
        Ok(Findings::new(problems, notes))
    }

    async fn checksum(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        _entry: usize,
        _chunk: usize,
    ) -> Result<ChunkChecksum, CheckpointError> {
        Ok(ChunkChecksum::Absent)
    }

    async fn index_facts(&self) -> Result<IndexFacts, CheckpointError> {
        let findings = HfReader::findings(self).await?;
        let of = |kinds: &'static [FindingKind]| {
            findings.iter().filter(move |finding| kinds.contains(&finding.kind))
        };
        let mut facts = IndexFacts::default();
        // The keys in a file without a readable header are unknown.
        let closed = of(&[FindingKind::MissingFile, FindingKind::Header]);
        facts.unread_files = closed.filter_map(|finding| finding.file.clone()).collect();
        let unfinished =
            of(&[FindingKind::MissingIndex, FindingKind::Index, FindingKind::Unfinished]);
        facts.unfinished = unfinished.map(|finding| finding.message.clone()).collect();
        Ok(facts)
    }

    async fn save_record(&self, _: &[bool]) -> Result<Option<SaveRecord>, CheckpointError> {
        Ok(None)
    }

    fn records(&self) -> Option<&dyn RecordAudit> {
        None
    }
}
