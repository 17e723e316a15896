//! The records of a file of `torch.save`, which a check compares besides tensors and objects.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointAudit, ChunkChecksum, Findings, FoundKind, FoundProblem, IndexFacts, RecordAudit,
    RecordLimits, SaveRecord, StoredRecord,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError};

use super::reader::TorchSaveReader;
use crate::pickle::ForeignName;
use crate::torch_zip::{Inflater, Method, Record};

impl TorchSaveReader {
    async fn compare(
        &self,
        record: &Record,
        limits: RecordLimits<'_>,
    ) -> Result<(), CheckpointError> {
        let (mut at, end) = (record.data.start, record.data.end);
        let mut crc = crc32fast::Hasher::new();
        let mut inflater = match record.method {
            Method::Stored => None,
            _ => Some(Inflater::new(record)?),
        };
        while at < end {
            let next = end.min(at.saturating_add(limits.segment_bytes));
            let bytes = self.storage().read_range(self.key(), at..next).await?;
            match &mut inflater {
                Some(inflater) => inflater.push(&bytes, |_| ())?,
                None => crc.update(&bytes),
            }
            limits.advance(next - at);
            at = next;
        }
        match inflater {
            Some(inflater) => inflater.finish()?,
            None => record.check_crc32(crc.finalize())?,
        }
        Ok(())
    }
}

#[async_trait]
impl CheckpointAudit for TorchSaveReader {
    async fn findings(&self) -> Result<Findings, CheckpointError> {
        let mut notes = self.notes().await?;
        let trailing = self.trailing_bytes().await?;
        if trailing > 0 {
            let said = "bytes follow the end of the archive; PyTorch reads over them";
            notes.push(format!("{trailing} {said}"));
        }
        let records = TorchSaveReader::records(self).await?;
        let unchecked = records.iter().all(|record| record.record.crc32.is_none());
        let unchecked = unchecked.then_some("the file has no checksums, so its data was only read");
        // That no two storages share bytes, the reader has compared.
        Ok(Findings::new(Vec::new(), notes)
            .with_unchecked(unchecked.map(ToOwned::to_owned))
            .with_shares_bytes(true))
    }

    async fn checksum(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        entry: usize,
        chunk: usize,
    ) -> Result<ChunkChecksum, CheckpointError> {
        if let Some(crc32) = self.chunk_crc32(metadata, entry, chunk).await? {
            return Ok(ChunkChecksum::Crc32(crc32));
        }
        let tensor = metadata.at(entry).and_then(|(_, entry)| entry.as_tensor());
        let placement = tensor.and_then(|tensor| tensor.chunks.get(chunk)?.placement);
        let Some(placement) = placement else { return Ok(ChunkChecksum::Absent) };
        Ok(match self.record_at(&placement).await? {
            Some(_) => ChunkChecksum::Record,
            None => ChunkChecksum::Absent,
        })
    }

    async fn index_facts(&self) -> Result<IndexFacts, CheckpointError> {
        let mut facts = IndexFacts::default();
        facts.callables = self.foreign_names().await?.iter().map(ForeignName::callable).collect();
        facts.devices = self.devices().await?;
        Ok(facts)
    }

    async fn save_record(&self, _: &[bool]) -> Result<Option<SaveRecord>, CheckpointError> {
        Ok(None)
    }

    fn records(&self) -> Option<&dyn RecordAudit> {
        Some(self)
    }
}

#[async_trait]
impl RecordAudit for TorchSaveReader {
    async fn records(&self) -> Result<Vec<StoredRecord>, CheckpointError> {
        let records = TorchSaveReader::records(self).await?.into_iter();
        let stored = records.map(|one| {
            let name = one.name.to_string();
            StoredRecord::new(name, self.key().clone(), one.record.data).with_keys(one.tensors)
        });
        Ok(stored.collect())
    }

    async fn check_record(
        &self,
        record: &StoredRecord,
        limits: RecordLimits<'_>,
    ) -> Result<(), CheckpointError> {
        let Some(known) = self.record_named(&record.name).await? else {
            let problem = format!("there is no record {:?}", record.name);
            return Err(FormatError::new("torch archive", problem).into());
        };
        self.compare(&known, limits).await.map_err(|error| match error {
            CheckpointError::Format(error) => error.in_file(self.key().as_str(), 0).into(),
            other => other,
        })
    }

    async fn check_structure(&self) -> Result<Vec<FoundProblem>, CheckpointError> {
        let mut found = Vec::new();
        let file = Some(self.key().clone());
        TorchSaveReader::check_structure(self, |error: FormatError| {
            let problem = FoundProblem::new(FoundKind::Corrupt, error.problem());
            found.push(problem.with_file(file.clone()).at(error.byte_offset()));
        })
        .await?;
        Ok(found)
    }
}
