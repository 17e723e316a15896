//! Merges checkpoints with different keys into one.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Entry, Placement};
use dcp_core::plan::{LoadPlan, ReadItem};
use dcp_core::{CheckpointError, CheckpointMetadata, PlanError, StorageReader};

use crate::error::JobError;
use crate::integrity::check::refuse_unsound;
use crate::options::JobOptions;
use crate::source::Source;

use super::equality::{Input, difference};
use super::joined::Joined;
use super::scratch::no_entry;
use super::translated::Translated;

/// The treatment of a key that several checkpoints have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Duplicates {
    /// An error.
    #[default]
    Refuse,
    /// The first one, if all are equal byte by byte; an error otherwise.
    Identical,
}

/// A reader of everything in several checkpoints, in their order.
#[derive(Debug)]
pub struct Merged {
    parts: Vec<MergedPart>,
    metadata: Arc<CheckpointMetadata>,
    /// By entry: the part, and the entry in it.
    inward: Vec<(u32, u32)>,
}

#[derive(Debug)]
struct MergedPart {
    reader: Arc<dyn StorageReader>,
    metadata: Arc<CheckpointMetadata>,
    /// Entries of the merged index, by entries of the part.
    outward: Arc<HashMap<u32, u32>>,
}

impl Merged {
    /// Merges `sources` for a job.
    ///
    /// # Errors
    ///
    /// [`JobError::Disagreement`] with all duplicate keys that `duplicates` does not allow;
    /// also when a source cannot be read or is inconsistent.
    pub async fn apply(
        sources: &[Source],
        duplicates: Duplicates,
        job: &JobOptions,
    ) -> Result<Source, JobError> {
        let mut inputs = Vec::with_capacity(sources.len());
        for source in sources {
            let input = Input::open(source, job).await?;
            refuse_unsound(&input.metadata)?;
            inputs.push(input);
        }
        let owners = owners(&inputs, duplicates, job).await?;
        let view = Self::new(&inputs, &owners)?;
        let parts: Vec<_> = inputs.into_iter().map(|input| input.source).collect();
        let storages = parts.iter().map(|part| Arc::clone(&part.storage)).collect();
        let mut merged = Source::derived(Arc::new(view), &parts)
            .ok_or_else(|| JobError::invalid_option("a merge", "needs at least one checkpoint"))?;
        merged.storage = Arc::new(Joined::new(storages));
        Ok(merged)
    }

    fn new(inputs: &[Input], owners: &[Vec<usize>]) -> Result<Self, CheckpointError> {
        let mut metadata = CheckpointMetadata::new();
        if let Some(first) = inputs.first() {
            *metadata.provenance_mut() = first.metadata.provenance().clone();
        }
        let (mut parts, mut inward) = (Vec::with_capacity(inputs.len()), Vec::new());
        for (number, (input, owned)) in inputs.iter().zip(owners).enumerate() {
            let mut outward = HashMap::with_capacity(owned.len());
            for &entry in owned {
                let Some((fqn, stored)) = input.metadata.at(entry) else { continue };
                let moved = moved(stored, Some(number), &input.metadata, &mut metadata);
                let here = metadata.insert(Arc::clone(fqn), moved);
                let id = |n: usize| {
                    let what = || "the number of keys of a merge".to_owned();
                    u32::try_from(n)
                        .map_err(|_| PlanError::TooLarge { what: what(), limit: u32::MAX.into() })
                };
                outward.insert(id(entry)?, id(here)?);
                inward.push((id(number)?, id(entry)?));
            }
            parts.push(MergedPart {
                reader: Arc::clone(&input.source.reader),
                metadata: Arc::clone(&input.metadata),
                outward: Arc::new(outward),
            });
        }
        Ok(Self { parts, metadata: Arc::new(metadata), inward })
    }
}

/// The entries to take from each input.
async fn owners(
    inputs: &[Input],
    duplicates: Duplicates,
    job: &JobOptions,
) -> Result<Vec<Vec<usize>>, JobError> {
    let mut first: HashMap<&Arc<str>, usize> = HashMap::new();
    let mut owners = Vec::with_capacity(inputs.len());
    let mut problems = Vec::new();
    for (number, input) in inputs.iter().enumerate() {
        let mut owned = Vec::with_capacity(input.metadata.len());
        for (entry, (fqn, _)) in input.metadata.iter().enumerate() {
            let Some(&earlier) = first.get(fqn) else {
                first.insert(fqn, number);
                owned.push(entry);
                continue;
            };
            let both = format!("{fqn:?} is in checkpoints {} and {}", earlier + 1, number + 1);
            match (duplicates, inputs.get(earlier)) {
                // Where they differ, rank 0 of a group fails, and all ranks with it.
                (Duplicates::Identical, _) if !job.is_coordinator() => {}
                (Duplicates::Identical, Some(other)) => {
                    if let Some(how) = difference(other, input, fqn).await? {
                        problems.push(format!("{both}: {how}"));
                    }
                }
                _ => problems.push(both),
            }
        }
        owners.push(owned);
    }
    if problems.is_empty() {
        Ok(owners)
    } else {
        Err(JobError::Disagreement { problems, structure: false })
    }
}

/// Moves an entry of one input to the joined storage. Without a `number` it stays where it is.
pub(super) fn moved(
    entry: &Entry,
    number: Option<usize>,
    from: &CheckpointMetadata,
    to: &mut CheckpointMetadata,
) -> Entry {
    let mut place = |placement: Option<Placement>| {
        let placement = placement?;
        let file = from.file(placement.file)?;
        let file = match number {
            Some(number) => to.intern_file(&Joined::key(number, file)?)?,
            None => to.intern_file(file)?,
        };
        let encoding = to.intern_encoding(from.encoding(&placement)?)?;
        Some(Placement { file, encoding, ..placement })
    };
    let mut entry = entry.clone();
    match &mut entry {
        Entry::Tensor(tensor) => tensor.chunks.map_placements(place),
        Entry::Object(object) => object.placement = place(object.placement),
        _ => {}
    }
    entry
}

#[async_trait]
impl StorageReader for Merged {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut plans = vec![LoadPlan::default(); self.parts.len()];
        for item in &plan.items {
            let place = self.inward.get(item.entry as usize);
            let found =
                place.and_then(|(part, entry)| Some((plans.get_mut(*part as usize)?, entry)));
            let (plan, entry) = found.ok_or_else(|| no_entry(item.entry))?;
            plan.items.push(ReadItem { entry: *entry, ..item.clone() });
        }
        let mut report = ReadReport::default();
        for (part, plan) in self.parts.iter().zip(plans) {
            if plan.items.is_empty() {
                continue;
            }
            let sink = Translated::new(Arc::clone(&sink), Arc::clone(&part.outward));
            report += part.reader.read(&part.metadata, &plan, Arc::new(sink)).await?;
        }
        Ok(report)
    }
}
