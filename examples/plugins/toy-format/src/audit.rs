//! What a check compares besides tensors and objects: the index, and files that it does not name.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{
    CheckpointAudit, ChunkChecksum, Findings, FoundProblem, IndexFacts, RecordAudit, RecordLimits,
    SaveRecord, StoredRecord,
};
use dcp_core::storage::StorageExt as _;
use dcp_core::{CheckpointError, CheckpointMetadata, FormatError, StorageReader};
use futures_util::TryStreamExt as _;

use crate::names::{CRC_BYTES, index, parse};
use crate::reader::ToyReader;

#[async_trait]
impl CheckpointAudit for ToyReader {
    async fn findings(&self) -> Result<Findings, CheckpointError> {
        let metadata = self.metadata().await?;
        let files: Vec<_> = self.storage().list_files(None).try_collect().await?;
        let stale = files.into_iter().map(|meta| meta.key);
        let stale = stale.filter(|key| parse(key).is_some() && !metadata.files().contains(key));
        let notes = stale.map(|key| format!("{key} is left of another save")).collect();
        Ok(Findings::new(Vec::new(), notes))
    }

    async fn checksum(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        _entry: usize,
        _chunk: usize,
    ) -> Result<ChunkChecksum, CheckpointError> {
        // The reader reads whole chunks only.
        Ok(ChunkChecksum::EveryRead)
    }

    async fn index_facts(&self) -> Result<IndexFacts, CheckpointError> {
        Ok(IndexFacts::default())
    }

    async fn save_record(&self, _: &[bool]) -> Result<Option<SaveRecord>, CheckpointError> {
        Ok(None)
    }

    fn records(&self) -> Option<&dyn RecordAudit> {
        Some(self)
    }
}

#[async_trait]
impl RecordAudit for ToyReader {
    async fn records(&self) -> Result<Vec<StoredRecord>, CheckpointError> {
        let byte_len = self.storage().stat(&index()?).await?.byte_len;
        Ok(vec![StoredRecord::new("the index", index()?, 0..byte_len)])
    }

    async fn check_record(
        &self,
        record: &StoredRecord,
        limits: RecordLimits<'_>,
    ) -> Result<(), CheckpointError> {
        let (mut at, end) = (record.bytes.start, record.bytes.end);
        let (mut crc, mut stored) = (crc32fast::Hasher::new(), Vec::new());
        while at < end {
            let next = end.min(at.saturating_add(limits.segment_bytes));
            let mut bytes = self.storage().read_range(&record.file, at..next).await?;
            let missing = (CRC_BYTES as usize - stored.len()).min(bytes.len());
            stored.extend_from_slice(&bytes.split_to(missing));
            crc.update(&bytes);
            limits.advance(next - at);
            at = next;
        }
        if crc.finalize().to_le_bytes() != *stored {
            let error = FormatError::new("toy checkpoint", "its checksum is another one");
            return Err(error.in_file(record.file.as_str(), 0).into());
        }
        Ok(())
    }

    async fn check_structure(&self) -> Result<Vec<FoundProblem>, CheckpointError> {
        Ok(Vec::new())
    }
}
