//! Checks of a DCP checkpoint besides those of tensors and objects.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointAudit, ChunkChecksum, Findings, FoundKind, FoundProblem, IndexFacts, RecordAudit,
};
use dcp_core::storage::ObjectMeta;
use dcp_core::{CheckpointError, CheckpointMetadata, StorageErrorKind, StorageReader as _};

use super::names::METADATA;
use super::reader::DcpReader;
use crate::leftovers::Leftovers;
use crate::safetensors::INDEX_ENDING;

/// Whether a file is of a save, whichever one: its data, or an index that was not renamed.
fn is_data(meta: &ObjectMeta) -> bool {
    let name = meta.key.as_str();
    name.ends_with(".distcp") && meta.byte_len > 0 || name.ends_with(".metadata.tmp")
}

impl DcpReader {
    /// Files whose lengths are not those that our own writer noted when it committed.
    async fn changed_files(
        &self,
        metadata: &CheckpointMetadata,
        found: &mut Findings,
    ) -> Result<(), CheckpointError> {
        let sidecar = match self.sidecar().await {
            Ok(Some(sidecar)) => sidecar,
            Ok(None) => return Ok(()),
            Err(CheckpointError::Format(error)) => {
                found.notes.push(error.to_string());
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for key in metadata.files() {
            let Some(noted) = sidecar.files.iter().find(|file| file.name == key.as_str()) else {
                continue;
            };
            let len = match self.storage().stat(key).await {
                Ok(meta) => meta.byte_len,
                Err(error) if error.kind() == StorageErrorKind::NotFound => continue,
                Err(error) => return Err(error.into()),
            };
            if noted.byte_len != len {
                let message = format!(
                    "the file has {len} bytes, it had {} when it was saved",
                    noted.byte_len
                );
                let problem = FoundProblem::new(FoundKind::ChangedFile, message);
                found.problems.push(problem.with_file(Some(key.clone())));
            }
        }
        Ok(())
    }
}

#[async_trait]
impl CheckpointAudit for DcpReader {
    async fn findings(&self) -> Result<Findings, CheckpointError> {
        let metadata = self.metadata().await?;
        let is_foreign = |name: &str| name.ends_with(INDEX_ENDING);
        let left = Leftovers::find(&**self.storage(), &metadata, is_data, is_foreign).await;
        let notes = left.notes("unreferenced file", ", left by another save");
        let mut found = Findings::new(Vec::new(), notes);
        found.notes.extend(self.rank_warnings().await?.iter().cloned());
        self.changed_files(&metadata, &mut found).await?;
        Ok(found)
    }

    async fn checksum(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        entry: usize,
        chunk: usize,
    ) -> Result<ChunkChecksum, CheckpointError> {
        let saved = self.saved_checksums().await?;
        let noted = || {
            let (_, entry) = metadata.at(entry)?;
            let placement = entry.as_tensor()?.chunks.get(chunk)?.placement?;
            saved.get(metadata.file(placement.file)?)?.at(placement.byte_offset)
        };
        Ok(noted().map_or(ChunkChecksum::Encoding, ChunkChecksum::EncodingOf))
    }

    async fn index_facts(&self) -> Result<IndexFacts, CheckpointError> {
        let mut facts = IndexFacts::default();
        let names = self.foreign_names().await?;
        facts.callables = names.iter().map(|name| name.callable().in_index(METADATA)).collect();
        Ok(facts)
    }

    async fn provenance(&self) -> Result<Vec<(&'static str, String)>, CheckpointError> {
        let sidecar = match self.sidecar().await {
            Err(CheckpointError::Format(_)) => None,
            sidecar => sidecar?,
        };
        Ok(sidecar.map_or_else(Vec::new, |sidecar| {
            let items: usize = sidecar.files.iter().map(|file| file.chunks.len()).sum();
            let mut facts =
                vec![("Written by", sidecar.tool), ("World size", sidecar.world_size.to_string())];
            if !sidecar.mesh.is_empty() {
                let mesh = sidecar.mesh.iter().map(|(name, size)| format!("{name}={size}"));
                facts.push(("Mesh", mesh.collect::<Vec<_>>().join(" ")));
            }
            facts.extend(sidecar.step.map(|step| ("Step", step.to_string())));
            facts.extend(sidecar.parent_step.map(|step| ("Parent step", step.to_string())));
            facts.push(("Sidecar", format!("checksums of {items} items")));
            facts
        }))
    }

    fn records(&self) -> Option<&dyn RecordAudit> {
        None
    }
}
