//! Some keys of a checkpoint, in the order and under the names that a selection gives them.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DataSink, Entry, FormatError, LoadPlan, PlanError,
    ReadItem, ReadReport, StorageReader,
};

use crate::error::ConvertError;
use crate::job::JobOptions;
use crate::select::{Chosen, Selection};
use crate::source::Source;
use crate::view::translated::Translated;

/// A reader that shows chosen entries of another one; bytes stay where they are.
#[derive(Debug)]
pub struct Selected {
    inner: Arc<dyn StorageReader>,
    inner_metadata: Arc<CheckpointMetadata>,
    metadata: Arc<CheckpointMetadata>,
    /// Positions in the inner index, by those here.
    inward: Vec<u32>,
    /// And the other way round.
    outward: Arc<HashMap<u32, u32>>,
}

impl Selected {
    /// `chosen` entries of what `inner` reads, no two of one name.
    ///
    /// # Errors
    ///
    /// When the inner index cannot be read, or has no such entries.
    pub async fn new(
        inner: Arc<dyn StorageReader>,
        chosen: &[Chosen],
    ) -> Result<Self, CheckpointError> {
        let inner_metadata = inner.metadata().await?;
        let mut metadata = CheckpointMetadata::new();
        *metadata.provenance_mut() = inner_metadata.provenance().clone();
        // In the same order they get the same ids, so placements stay as they are.
        let full = || FormatError::new("index", "it has too many files or encodings");
        for file in inner_metadata.files() {
            metadata.intern_file(file).ok_or_else(full)?;
        }
        for encoding in inner_metadata.encodings() {
            metadata.intern_encoding(encoding).ok_or_else(full)?;
        }
        let mut inward = Vec::with_capacity(chosen.len());
        let mut outward = HashMap::with_capacity(chosen.len());
        for one in chosen {
            let entry = inner_metadata.at(one.entry).map(|(_, entry)| entry.clone());
            let (Some(mut entry), Ok(position)) = (entry, u32::try_from(one.entry)) else {
                return Err(unknown(&one.fqn));
            };
            match &mut entry {
                Entry::Tensor(tensor) => tensor.path.clone_from(&one.path),
                Entry::Object(object) => object.path.clone_from(&one.path),
                _ => {}
            }
            let here = metadata.insert(Arc::clone(&one.fqn), entry);
            if here != inward.len() {
                return Err(PlanError::DuplicateFqn { fqn: one.fqn.to_string() }.into());
            }
            outward.insert(position, u32::try_from(here).unwrap_or(u32::MAX));
            inward.push(position);
        }
        let (metadata, outward) = (Arc::new(metadata), Arc::new(outward));
        Ok(Self { inner, inner_metadata, metadata, inward, outward })
    }
}

impl Selection {
    /// The chosen part of a checkpoint, as a job reads it.
    ///
    /// # Errors
    ///
    /// As [`Selection::of`], when the selection leaves nothing, and when the checkpoint cannot be
    /// read.
    pub async fn apply(&self, source: &Source, job: &JobOptions) -> Result<Source, ConvertError> {
        if self.is_everything() {
            return Ok(source.clone());
        }
        let metadata = source.metadata().await?;
        let chosen = self.of(&metadata)?;
        if chosen.is_empty() && !metadata.is_empty() {
            let problem = "leaves nothing of the checkpoint";
            return Err(ConvertError::unsupported("the selection", problem));
        }
        let inner = source.for_job(job.parallelism);
        let reader = Arc::new(Selected::new(Arc::clone(&inner.reader), &chosen).await?);
        Ok(Source::derived(reader, &[inner]).unwrap_or_else(|| source.clone()))
    }
}

#[async_trait]
impl StorageReader for Selected {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut inner = LoadPlan::default();
        for item in &plan.items {
            let entry = self.inward.get(item.entry as usize).copied();
            let entry = entry.ok_or_else(|| unknown(&item.entry.to_string()))?;
            inner.items.push(ReadItem { entry, ..item.clone() });
        }
        let sink = Arc::new(Translated::new(sink, Arc::clone(&self.outward)));
        self.inner.read(&self.inner_metadata, &inner, sink).await
    }
}

fn unknown(fqn: &str) -> CheckpointError {
    let problem = "it is not in the checkpoint that this is a view of".to_owned();
    PlanError::Unsupported { fqn: fqn.to_owned(), problem }.into()
}
