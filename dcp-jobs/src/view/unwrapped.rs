//! Presents quantized tensors of torchao's classes as dequantized ones.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::StateProblem;
use dcp_core::metadata::{Encoding, Entry, Layout, ObjectEntry, Placement, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, FormatError, Region, StorageReader, TensorView,
    Value,
};

use crate::cast::{CastCounts, CastOptions, Caster};
use crate::error::JobError;

use super::scratch::{SCRATCH, invalid_region, name, not_a_tensor, outside, pieces, unread};
use super::torchao::{Quantized, is_known};

/// The number of stored tensors to cache.
const KEPT: usize = 4;

/// A reader that dequantizes tensors of torchao's classes. It reads each one whole.
pub(super) struct Unwrapped {
    inner: Arc<dyn StorageReader>,
    inner_metadata: Arc<CheckpointMetadata>,
    metadata: Arc<CheckpointMetadata>,
    unwrapped: HashSet<u32>,
    caster: Caster,
    kept: Mutex<VecDeque<(u32, Arc<Quantized>)>>,
}

impl Unwrapped {
    /// A reader over `inner`, with values of `dtype`; `None` when no entry has a supported class.
    pub(super) async fn new(
        inner: Arc<dyn StorageReader>,
        dtype: DType,
    ) -> Result<Option<Self>, JobError> {
        let inner_metadata = inner.metadata().await?;
        let mut metadata = CheckpointMetadata::clone(&inner_metadata);
        let mut unwrapped = HashSet::new();
        // Objects of a file share its placement.
        let encoding = Encoding::new(Layout::TorchSave).with_transforms(["dequantized".into()]);
        for (position, (fqn, entry)) in (0..).zip(inner_metadata.iter()) {
            let Some(object) = entry.as_object() else { continue };
            if !object.tensor.as_ref().is_some_and(|tensor| is_known(&tensor.class)) {
                continue;
            }
            let encoding = metadata.intern_encoding(&encoding);
            let encoding =
                encoding.ok_or_else(|| FormatError::new("index", "it has too many encodings"))?;
            let tensor = plain(object, dtype, encoding)
                .map_err(|error| FormatError::new("index", format!("{fqn:?}: {error}")))?;
            if let Some(tensor) = tensor {
                metadata.insert(Arc::clone(fqn), Entry::Tensor(tensor));
                unwrapped.insert(position);
            }
        }
        if unwrapped.is_empty() {
            return Ok(None);
        }
        let caster = Caster::new("numbers", DType::Float32, dtype, CastOptions::default())?;
        let (metadata, kept) = (Arc::new(metadata), Mutex::default());
        Ok(Some(Self { inner, inner_metadata, metadata, unwrapped, caster, kept }))
    }

    /// The stored tensor of an entry.
    async fn quantized(&self, entry: u32) -> Result<(Arc<Quantized>, u64), CheckpointError> {
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = kept().iter().find(|(of, _)| *of == entry) {
            return Ok((Arc::clone(found), 0));
        }
        let fqn = name(&self.metadata, entry);
        let object = self.inner_metadata.at(entry as usize).and_then(|(_, e)| e.as_object());
        let wrapped = object.and_then(|object| object.tensor.clone());
        let wrapped = wrapped.ok_or_else(|| not_a_tensor(&fqn))?;
        let sink = Arc::new(One::default());
        let plan =
            LoadPlan { items: vec![ReadItem { entry, leaf: entry, kind: ReadKind::Object }] };
        let read = self.inner.read(&self.inner_metadata, &plan, Arc::clone(&sink) as _).await?;
        let value = sink.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let value = value.ok_or_else(|| unread(&fqn))?;
        let made = Quantized::new(&fqn, &wrapped.class, &wrapped.shape, &value);
        let made = Arc::new(made.map_err(|problem| {
            let class = &wrapped.class;
            let advice = "leave it out, or dequantize it with the library that it is from";
            let problem = format!("this {class} cannot become plain numbers: {problem}; {advice}");
            StateProblem::NotCastable { problem }.of(fqn.to_string())
        })?);
        let mut kept = kept();
        kept.push_back((entry, Arc::clone(&made)));
        if kept.len() > KEPT {
            kept.pop_front();
        }
        Ok((made, read.bytes_read))
    }

    fn fill(
        &self,
        fqn: &str,
        region: &Region,
        made: &Quantized,
        view: &TensorView,
    ) -> Result<(), CheckpointError> {
        for piece in pieces(region, DType::Float32.size(), SCRATCH) {
            let piece = piece.map_err(|error| invalid_region(fqn, error))?;
            let target = piece.relative_to(region.offsets());
            let target = target.ok_or_else(|| outside(fqn, &piece, region))?;
            let target = view.narrow(&target)?;
            let mut elements = vec![0; usize::try_from(target.byte_len()).unwrap_or(0)];
            self.caster.cast(&made.numbers(&piece), &mut elements, &mut CastCounts::default());
            let failed = |source| CheckpointError::Memory { fqn: fqn.to_owned(), source };
            target.fill_from(&elements).map_err(failed)?;
        }
        Ok(())
    }
}

/// The tensor of an object: one chunk, under an encoding that only this view reads.
fn plain(
    object: &ObjectEntry,
    dtype: DType,
    encoding: u16,
) -> Result<Option<TensorEntry>, dcp_core::region::RegionError> {
    let Some(wrapped) = &object.tensor else { return Ok(None) };
    let placement = object.placement.map(|placement| Placement { encoding, ..placement });
    let mut tensor = TensorEntry::new(dtype, wrapped.shape.clone());
    tensor.path.clone_from(&object.path);
    let offsets = vec![0; wrapped.shape.len()];
    tensor.chunks.push(&offsets, &wrapped.shape, placement)?;
    Ok(Some(tensor))
}

#[async_trait]
impl StorageReader for Unwrapped {
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
        for item in &plan.items {
            let ReadKind::Tensor { region, .. } = &item.kind else {
                unchanged.items.push(item.clone());
                continue;
            };
            if !self.unwrapped.contains(&item.entry) {
                unchanged.items.push(item.clone());
                continue;
            }
            let (made, read) = self.quantized(item.entry).await?;
            let view = sink.destination(item)?;
            self.fill(&name(&self.metadata, item.entry), region, &made, &view)?;
            sink.commit(item)?;
            report += ReadReport::new(view.byte_len(), read);
        }
        if !unchanged.items.is_empty() {
            report += self.inner.read(&self.inner_metadata, &unchanged, sink).await?;
        }
        Ok(report)
    }
}

impl fmt::Debug for Unwrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unwrapped")
            .field("inner", &self.inner)
            .field("unwrapped", &self.unwrapped.len())
            .finish_non_exhaustive()
    }
}

/// Receives one object.
#[derive(Debug, Default)]
struct One(Mutex<Option<Value>>);

impl DataSink for One {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        Err(item.unrequested().into())
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, _item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        Ok(())
    }
}
