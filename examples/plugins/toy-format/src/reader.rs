//! Loading.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Entry, Placement, TensorEntry};
use dcp_core::overlap::find_overlap;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::storage::StorageExt as _;
use dcp_core::{
    CheckpointError, CheckpointMetadata, FormatError, Region, Storage, StorageErrorKind,
    StorageReader, Value,
};

use crate::names::{CRC_BYTES, INDEX, index};

/// Reads toy checkpoints. A chunk is read as a whole, so that its checksum is compared.
#[derive(Debug)]
pub struct ToyReader {
    storage: Arc<dyn Storage>,
}

fn damaged(problem: impl Into<String>) -> FormatError {
    FormatError::new("toy checkpoint", problem)
}

impl ToyReader {
    /// A reader of the checkpoint in `storage`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage }
    }

    /// The storage of the checkpoint.
    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    /// The stored bytes of an item, once their checksum was compared.
    async fn stored(
        &self,
        metadata: &CheckpointMetadata,
        placement: Option<Placement>,
    ) -> Result<Bytes, CheckpointError> {
        let file = placement.and_then(|placement| metadata.file(placement.file));
        let (Some(placement), Some(file)) = (placement, file) else {
            return Err(damaged("an item has no place").into());
        };
        let end = placement.byte_offset.saturating_add(placement.byte_len);
        let mut bytes = self.storage.read_range(file, placement.byte_offset..end).await?;
        let crc32 = bytes.split_off(bytes.len().saturating_sub(CRC_BYTES as usize));
        if crc32fast::hash(&bytes).to_le_bytes() != *crc32 {
            let error = damaged("the checksum of an item is another one");
            return Err(error.in_file(file.as_str(), placement.byte_offset).into());
        }
        Ok(bytes)
    }

    async fn read_item(
        &self,
        metadata: &CheckpointMetadata,
        item: &ReadItem,
        sink: &dyn DataSink,
    ) -> Result<ReadReport, CheckpointError> {
        let entry = metadata.at(item.entry as usize).map(|(_, entry)| entry);
        match (entry, &item.kind) {
            (Some(Entry::Object(object)), ReadKind::Object) => {
                let bytes = self.stored(metadata, object.placement).await?;
                let len = bytes.len() as u64;
                sink.object(item, Value::from_wire(&bytes)?)?;
                Ok(ReadReport::new(len, len + CRC_BYTES))
            }
            (Some(Entry::Tensor(tensor)), ReadKind::Tensor { chunk, region, .. }) => {
                let stored = tensor.chunks.get(*chunk as usize);
                let stored = stored.ok_or_else(|| damaged("a chunk is not in the index"))?;
                let bytes = self.stored(metadata, stored.placement).await?;
                let inside = region.relative_to(stored.offsets);
                let inside = inside.ok_or_else(|| damaged("a region is outside its chunk"))?;
                let element = tensor.dtype.size();
                let mut wanted = Vec::new();
                for (at, count) in inside.runs_in(stored.sizes) {
                    let begin = at as usize * element;
                    let run = bytes.get(begin..begin + count as usize * element);
                    wanted.extend_from_slice(run.ok_or_else(|| damaged("a chunk is too short"))?);
                }
                let filled = sink.destination(item)?.fill_from(&wanted);
                let fqn = metadata.entry_name(item.entry as usize).into_owned();
                let memory = |source| CheckpointError::Memory { fqn, source };
                filled.map_err(memory)?;
                sink.commit(item)?;
                Ok(ReadReport::new(wanted.len() as u64, bytes.len() as u64 + CRC_BYTES))
            }
            _ => Err(damaged("an item of the plan is not in the index").into()),
        }
    }
}

#[async_trait]
impl StorageReader for ToyReader {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        let mut bytes = match self.storage.read_all(&index()?).await {
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                let message = format!("there is no {INDEX}");
                return Err(CheckpointError::NotACheckpoint { message });
            }
            bytes => bytes?,
        };
        if bytes.len() < CRC_BYTES as usize {
            return Err(damaged("it is too short").in_file(INDEX, 0).into());
        }
        let crc32 = bytes.split_to(CRC_BYTES as usize);
        if crc32fast::hash(&bytes).to_le_bytes() != *crc32 {
            return Err(damaged("its checksum is another one").in_file(INDEX, 0).into());
        }
        let metadata = CheckpointMetadata::from_wire(&bytes)?;
        let mut ends = vec![0_u64; metadata.files().len()];
        for (fqn, entry) in metadata.iter() {
            let problem = |problem| damaged(format!("{fqn:?}: {problem}")).in_file(INDEX, 0);
            for placement in placements(entry).map_err(problem)? {
                let end = ends.get_mut(placement.file.index());
                let end = end.ok_or_else(|| problem("it is in no file".to_owned()))?;
                *end = (*end).max(placement.byte_offset.saturating_add(placement.byte_len));
            }
        }
        for (file, end) in metadata.files().iter().zip(ends) {
            let len = match self.storage.stat(file).await {
                Err(error) if error.kind() == StorageErrorKind::NotFound => None,
                meta => Some(meta?.byte_len),
            };
            if len.is_none_or(|len| len < end) {
                let problem = "the file is missing or too short; copy the checkpoint again";
                return Err(damaged(problem).in_file(file.as_str(), len.unwrap_or(0)).into());
            }
        }
        Ok(Arc::new(metadata))
    }

    async fn read(
        &self,
        metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        for item in &plan.items {
            report += self.read_item(metadata, item, &*sink).await?;
        }
        Ok(report)
    }
}

/// Where an entry is stored, once its chunks were compared with its shape.
fn placements(entry: &Entry) -> Result<Vec<Placement>, String> {
    let all: Option<Vec<_>> = match entry {
        Entry::Tensor(tensor) => {
            check_chunks(tensor)?;
            tensor.chunks.iter().map(|chunk| chunk.placement).collect()
        }
        Entry::Object(object) => object.placement.map(|placement| vec![placement]),
        _ => None,
    };
    all.ok_or_else(|| "it is not stored".to_owned())
}

fn check_chunks(tensor: &TensorEntry) -> Result<(), String> {
    let whole = Region::full(tensor.shape.clone()).map_err(|error| error.to_string())?;
    let mut rows = Vec::new();
    for chunk in tensor.chunks.iter() {
        let region = chunk.region().map_err(|error| error.to_string())?;
        let byte_len = region.volume().checked_mul(tensor.dtype.size() as u64);
        let stored = chunk.placement.map(|placement| placement.byte_len);
        let needed = byte_len.and_then(|len| len.checked_add(CRC_BYTES));
        if !whole.contains(&region) || stored != needed {
            return Err(format!("chunk {region} does not fit shape {}", tensor.shape));
        }
        rows.push((chunk.offsets, chunk.sizes));
    }
    match find_overlap(&rows) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err("its chunks overlap".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
