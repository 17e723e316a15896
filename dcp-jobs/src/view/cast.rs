//! Casts the tensors of a checkpoint to other dtypes.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Encoding, Entry, Layout, Placement, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointError, CheckpointMetadata, DType, StorageReader, TensorView};

use crate::cast::{CastCounts, CastOptions, CastReport, Caster, TensorCast};
use crate::error::JobError;
use crate::group::JobGroup;
use crate::integrity::checked_source::CheckedSource;
use crate::options::JobOptions;
use crate::source::{KeptObjects, Source};

use super::scratch::{SCRATCH, Scratch, invalid_region, name, outside, pieces};

/// A reader that casts tensors of another reader, a bounded part at a time.
pub struct Cast {
    inner: Arc<dyn StorageReader>,
    inner_metadata: Arc<CheckpointMetadata>,
    metadata: Arc<CheckpointMetadata>,
    /// By entry; `None` for entries that stay unchanged.
    casters: Vec<Option<Caster>>,
    counts: Mutex<Vec<CastCounts>>,
}

impl Cast {
    /// A reader over `inner` that casts each tensor to the dtype that `rule` returns for its name
    /// and dtype.
    ///
    /// # Errors
    ///
    /// When the inner index cannot be read, and for the first tensor that cannot be cast, as
    /// [`Caster::new`].
    pub async fn new(
        inner: Arc<dyn StorageReader>,
        rule: impl Fn(&str, DType) -> Option<DType>,
        options: CastOptions,
    ) -> Result<Self, JobError> {
        let inner_metadata = inner.metadata().await?;
        let mut metadata = CheckpointMetadata::clone(&inner_metadata);
        let mut casters = vec![None; metadata.len()];
        for (entry, caster) in casters.iter_mut().enumerate() {
            let Some((fqn, Entry::Tensor(tensor))) = inner_metadata.at(entry) else { continue };
            let to = rule(fqn, tensor.dtype).filter(|to| *to != tensor.dtype);
            let Some(to) = to else { continue };
            *caster = Some(Caster::new(fqn, tensor.dtype, to, options)?);
            let computed = computed(&mut metadata, tensor, to);
            metadata.insert(Arc::clone(fqn), Entry::Tensor(computed));
        }
        let counts = Mutex::new(vec![CastCounts::default(); casters.len()]);
        Ok(Self { inner, inner_metadata, metadata: Arc::new(metadata), casters, counts })
    }

    /// Casts `source` for a job. Also returns the view, for its [`report`](Self::report).
    ///
    /// # Errors
    ///
    /// As [`Cast::new`].
    pub async fn apply(
        source: &Source,
        rule: impl Fn(&str, DType) -> Option<DType>,
        options: CastOptions,
        job: &JobOptions,
    ) -> Result<(Source, Arc<Self>), JobError> {
        let inner = CheckedSource::new(source, job);
        let view = Arc::new(Self::new(Arc::clone(&inner.reader), rule, options).await?);
        let cast = Source::derived(Arc::clone(&view) as _, std::slice::from_ref(&inner));
        let kept = inner.kept().map(|kept| {
            let mut kept = KeptObjects::clone(kept);
            let is_cast = |at: usize| view.casters.get(at).is_some_and(Option::is_some);
            kept.names.retain(|fqn, _| !view.metadata.index_of(fqn).is_some_and(is_cast));
            Arc::new(kept)
        });
        let cast = cast.map(|cast| cast.keeping(kept));
        Ok((cast.unwrap_or_else(|| source.clone()), view))
    }

    /// The losses of casting, over what was read so far. Lists all tensors from the start.
    #[must_use]
    pub fn report(&self) -> CastReport {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let cast = self.casters.iter().zip(counts.iter()).zip(self.metadata.iter());
        let tensors = cast.filter_map(|((caster, counts), (fqn, _))| {
            let caster = caster.as_ref()?;
            let (from, to) = (caster.from().name(), caster.to().name());
            Some((Arc::clone(fqn), TensorCast::new(from, to, *counts)))
        });
        CastReport { tensors: tensors.collect() }
    }

    /// Adds what the other ranks of a group have lost to what this one has, on rank 0.
    ///
    /// # Errors
    ///
    /// When a rank failed or was lost.
    pub async fn gather_counts(&self, group: &JobGroup) -> Result<(), CheckpointError> {
        let mut message = MessageWriter::new(*b"dcc2");
        {
            let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            counts.iter().for_each(|counts| counts.write_to(&mut message));
        }
        let Some(all) = group.gather(message.finish()).await? else { return Ok(()) };
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        for message in all.iter().skip(1) {
            let mut message = MessageReader::new(message, *b"dcc2")?;
            for sum in counts.iter_mut() {
                sum.add(&CastCounts::read_from(&mut message)?);
            }
            message.finish()?;
        }
        Ok(())
    }

    fn caster(&self, entry: u32) -> Option<&Caster> {
        self.casters.get(entry as usize)?.as_ref()
    }

    /// Reads and casts `parts`, and passes them to the sink.
    async fn flush(
        &self,
        scratch: &mut Scratch,
        parts: &mut Vec<Part>,
        report: &mut ReadReport,
    ) -> Result<(), CheckpointError> {
        let taken = std::mem::take(scratch);
        let (read, cost) = taken.read(&*self.inner, &self.inner_metadata).await?;
        *report += ReadReport::new(0, cost.bytes_read);
        for (part, bytes) in parts.drain(..).zip(read) {
            self.hand_over(&part, &bytes)?;
            *report += ReadReport::new(part.target.byte_len(), 0);
        }
        Ok(())
    }

    fn hand_over(&self, part: &Part, bytes: &Bytes) -> Result<(), CheckpointError> {
        let Some(caster) = self.caster(part.entry) else { return Ok(()) };
        let failed = |source| CheckpointError::Memory {
            fqn: name(&self.metadata, part.entry).to_string(),
            source,
        };
        let mut counts = CastCounts::default();
        if part.target.is_contiguous() {
            let mut memory = part.target.lend().map_err(failed)?;
            caster.cast(bytes, &mut memory, &mut counts);
        } else {
            let len = usize::try_from(part.target.byte_len()).unwrap_or(0);
            let mut elements = vec![0; len];
            caster.cast(bytes, &mut elements, &mut counts);
            part.target.fill_from(&elements).map_err(failed)?;
        }
        let mut all = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sum) = all.get_mut(part.entry as usize) {
            sum.add(&counts);
        }
        Ok(())
    }
}

/// A part of an item to cast, and its destination.
struct Part {
    entry: u32,
    target: TensorView,
}

/// The cast tensor. Its chunks keep their placements under an encoding that only this view reads,
/// so tied tensors remain recognizable. Chunks whose placement does not determine their elements
/// get none.
fn computed(metadata: &mut CheckpointMetadata, tensor: &TensorEntry, to: DType) -> TensorEntry {
    let mut cast = tensor.clone();
    cast.dtype = to;
    cast.chunks.map_placements(|placement| {
        let placement = placement?;
        let stored = metadata.encoding(&placement)?;
        let mut transforms = stored.transforms.clone();
        let layout =
            if stored.layout.is_fixed_by_place() { Layout::Computed } else { stored.layout };
        transforms.push(format!("cast from {}", tensor.dtype).into());
        let encoding = Encoding::new(layout).with_transforms(transforms);
        let encoding = metadata.intern_encoding(&encoding)?;
        Some(Placement { encoding, ..placement })
    });
    cast
}

#[async_trait]
impl StorageReader for Cast {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut report = ReadReport::default();
        let mut unchanged = LoadPlan::default();
        let (mut scratch, mut parts) = (Scratch::default(), Vec::new());
        let mut done: Vec<&ReadItem> = Vec::new();
        for item in &plan.items {
            let (ReadKind::Tensor { chunk, region, .. }, Some(caster)) =
                (&item.kind, self.caster(item.entry))
            else {
                unchanged.items.push(item.clone());
                continue;
            };
            let target = sink.destination(item)?;
            for piece in pieces(region, caster.from().size(), SCRATCH) {
                let fqn = || name(&self.metadata, item.entry);
                let piece = piece.map_err(|error| invalid_region(&fqn(), error))?;
                let inner = piece.relative_to(region.offsets());
                let inner = inner.ok_or_else(|| outside(&fqn(), &piece, region))?;
                parts.push(Part { entry: item.entry, target: target.narrow(&inner)? });
                scratch.push(item.entry, *chunk, caster.from(), piece);
                if scratch.len() >= SCRATCH {
                    self.flush(&mut scratch, &mut parts, &mut report).await?;
                    drain(&mut done, &*sink)?;
                }
            }
            done.push(item);
        }
        if !parts.is_empty() {
            self.flush(&mut scratch, &mut parts, &mut report).await?;
        }
        drain(&mut done, &*sink)?;
        if !unchanged.items.is_empty() {
            report += self.inner.read(&self.inner_metadata, &unchanged, sink).await?;
        }
        Ok(report)
    }
}

/// Notifies the sink of items that are complete.
fn drain(done: &mut Vec<&ReadItem>, sink: &dyn DataSink) -> Result<(), CheckpointError> {
    done.drain(..).try_for_each(|item| sink.commit(item))
}

impl fmt::Debug for Cast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cast = self.casters.iter().flatten().count();
        f.debug_struct("Cast").field("inner", &self.inner).field("cast", &cast).finish()
    }
}
