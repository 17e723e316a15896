//! Checks of a DCP checkpoint besides those of tensors and objects.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointAudit, ChunkChecksum, Findings, FoundKind, FoundProblem, IndexFacts, RecordAudit,
    SaveFacts, SaveRecord,
};
use dcp_core::metadata::{Entry, Placement};
use dcp_core::storage::ObjectMeta;
use dcp_core::{CheckpointError, CheckpointMetadata, StorageErrorKind, StorageReader as _};

use super::names::METADATA;
use super::reader::DcpReader;
use super::sidecar::{Sidecar, SidecarFile};
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

/// Returns the facts of the sidecar, and the number of counted entries that it covers.
fn save_facts(sidecar: Sidecar, metadata: &CheckpointMetadata, counted: &[bool]) -> SaveFacts {
    let mut facts = SaveFacts::default();
    let mut used = vec![false; metadata.files().len()];
    let by_name: HashMap<&str, &SidecarFile> =
        sidecar.files.iter().map(|file| (&*file.name, file)).collect();
    let of_file: Vec<Option<&SidecarFile>> =
        metadata.files().iter().map(|key| by_name.get(key.as_str()).copied()).collect();
    let mut count = |placement: Placement| {
        let file = of_file.get(placement.file.index()).copied().flatten();
        let crc32 = file.and_then(|file| file.chunks.at(placement.byte_offset));
        facts.items_with_checksum += u64::from(crc32.is_some());
        facts.items += 1;
        if let Some(used) = used.get_mut(placement.file.index()) {
            *used = true;
        }
    };
    for ((_, entry), _) in metadata.iter().zip(counted).filter(|(_, counted)| **counted) {
        match entry {
            Entry::Tensor(tensor) => {
                tensor.chunks.iter().filter_map(|chunk| chunk.placement).for_each(&mut count);
            }
            Entry::Object(object) => object.placement.into_iter().for_each(&mut count),
            _ => {}
        }
    }
    for (file, _) in of_file.iter().zip(used).filter(|(_, used)| *used) {
        facts.files += 1;
        facts.files_with_digest += u64::from(file.is_some_and(|file| file.sha256.is_some()));
    }
    (facts.tool, facts.world_size, facts.mesh) = (sidecar.tool, sidecar.world_size, sidecar.mesh);
    (facts.step, facts.parent_step) = (sidecar.step, sidecar.parent_step);
    facts
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

    async fn save_record(&self, counted: &[bool]) -> Result<Option<SaveRecord>, CheckpointError> {
        let sidecar = match self.sidecar().await {
            Ok(Some(sidecar)) => sidecar,
            Ok(None) => return Ok(Some(SaveRecord::Absent)),
            Err(CheckpointError::Format(error)) => {
                return Ok(Some(SaveRecord::Damaged(error.to_string())));
            }
            Err(error) => return Err(error),
        };
        let facts = save_facts(sidecar, &*self.metadata().await?, counted);
        Ok(Some(SaveRecord::Found(facts)))
    }

    fn records(&self) -> Option<&dyn RecordAudit> {
        None
    }
}
