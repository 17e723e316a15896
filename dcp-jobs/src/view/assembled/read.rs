//! Reads assembled tensors.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::TensorError;
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Dims, PlanError, Region, StorageReader, TensorView, Value,
};

use crate::read::runs::boxes;
use crate::view::scratch::{SCRATCH, assembly, name, no_entry, not_a_tensor, outside, pieces};

use super::{Assembled, Origin, PartReader, Piece, PieceFrom};

#[async_trait]
impl StorageReader for Assembled {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let mut inner = Inner::new(&self.parts, Arc::clone(&sink));
        let mut filled = Vec::new();
        for item in &plan.items {
            let origin = self.origins.get(item.entry as usize);
            let fqn = || name(&self.metadata, item.entry);
            match (origin, &item.kind) {
                (Some(Origin::Passed { part, entry }), _) => inner.pass(*part, *entry, item),
                (Some(Origin::Value(value)), ReadKind::Object) => {
                    sink.object(item, value.clone())?;
                }
                (Some(Origin::Pieces(pieces)), ReadKind::Tensor { chunk, region, .. }) => {
                    let (entry, number) = (item.entry.into(), Some((*chunk).into()));
                    let piece = pieces.get(*chunk as usize);
                    let piece = piece.ok_or(PlanError::no_entry(entry, number))?;
                    if !piece.region.contains(region) {
                        return Err(outside(&fqn(), region, &piece.region));
                    }
                    let target = sink.destination(item)?;
                    inner.piece(piece, region, &target).map_err(|error| error.of(&fqn()))?;
                    filled.push(item);
                }
                (Some(Origin::Value(_)), _) => return Err(not_a_tensor(&fqn())),
                (Some(Origin::Pieces(_)), _) => {
                    return Err(PlanError::not_an_object(fqn().to_string()).into());
                }
                (None, _) => return Err(no_entry(item.entry)),
            }
        }
        let report = inner.read().await?;
        for item in filled {
            sink.commit(item)?;
        }
        Ok(report)
    }
}

/// An error of planning a piece, without the tensor's name.
enum PieceError {
    Problem(String),
    Error(CheckpointError),
}

impl PieceError {
    fn of(self, fqn: &str) -> CheckpointError {
        match self {
            Self::Problem(problem) => assembly(fqn, problem),
            Self::Error(error) => error,
        }
    }
}

impl From<PlanError> for PieceError {
    fn from(error: PlanError) -> Self {
        Self::Error(error.into())
    }
}

impl From<TensorError> for PieceError {
    fn from(error: TensorError) -> Self {
        Self::Error(error.into())
    }
}

fn problem(error: impl std::fmt::Display) -> PieceError {
    PieceError::Problem(error.to_string())
}

/// The reads of each part.
struct Inner<'a> {
    parts: &'a [PartReader],
    plans: Vec<LoadPlan>,
    slots: Vec<Slot>,
    sink: Arc<dyn DataSink>,
}

/// The destination of a part's item.
#[derive(Debug)]
enum Slot {
    /// The caller's sink, for this item of the caller.
    Passed(ReadItem),
    /// Memory that begins at these offsets of the part's tensor.
    Piece(Dims, TensorView),
}

impl<'a> Inner<'a> {
    fn new(parts: &'a [PartReader], sink: Arc<dyn DataSink>) -> Self {
        let plans = parts.iter().map(|_| LoadPlan::default()).collect();
        Self { parts, plans, slots: Vec::new(), sink }
    }

    fn push(&mut self, part: usize, entry: u32, kind: ReadKind, slot: Slot) {
        let leaf = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        self.slots.push(slot);
        if let Some(plan) = self.plans.get_mut(part) {
            plan.items.push(ReadItem { entry, leaf, kind });
        }
    }

    fn pass(&mut self, part: usize, entry: u32, item: &ReadItem) {
        self.push(part, entry, item.kind.clone(), Slot::Passed(item.clone()));
    }

    /// Fills `target` with the elements `wanted` of the assembled tensor, all within `piece`.
    fn piece(
        &mut self,
        piece: &Piece,
        wanted: &Region,
        target: &TensorView,
    ) -> Result<(), PieceError> {
        let inside = wanted.relative_to(piece.region.offsets());
        let inside = inside.ok_or_else(|| problem("it begins before its piece"))?;
        match &piece.from {
            PieceFrom::Zeros => fill_with_zeros(target),
            PieceFrom::Box { part, entry, region, axes } => {
                let (source, back) = in_source(&inside, region, axes).map_err(problem)?;
                self.source_box(*part, *entry, &source, &target.with_axes(&back)?)
            }
            PieceFrom::Reshaped { part, entry, region } => {
                self.reshaped(*part, *entry, region, &inside, piece.region.sizes(), target)
            }
        }
    }

    /// Fills `target` with a box of a part's tensor, chunk by chunk.
    fn source_box(
        &mut self,
        part: usize,
        entry: usize,
        wanted: &Region,
        target: &TensorView,
    ) -> Result<(), PieceError> {
        let parts = self.parts;
        let chunks = parts.get(part).and_then(|part| part.chunks.get(&entry));
        let chunks = chunks.ok_or_else(|| problem("its part is missing"))?;
        let entry = u32::try_from(entry).map_err(problem)?;
        let mut found = 0_u64;
        for (chunk, region) in chunks.find(wanted) {
            found = found.saturating_add(region.volume());
            let inside = region.relative_to(wanted.offsets());
            let inside = inside.ok_or_else(|| problem("a chunk begins before its box"))?;
            let slot = Slot::Piece(region.offsets().clone(), target.narrow(&inside)?);
            self.push(part, entry, ReadKind::Tensor { chunk, shard: 0, region }, slot);
        }
        if found == wanted.volume() {
            return Ok(());
        }
        let expected = wanted.volume();
        let what = if found < expected { "are not stored" } else { "are stored twice" };
        Err(PieceError::Problem(format!("elements of {wanted}, which it is made of, {what}")))
    }

    /// Fills `target` with the box `inside` of a piece of shape `shape` whose row-major elements
    /// are those of the box `source`.
    fn reshaped(
        &mut self,
        part: usize,
        entry: usize,
        source: &Region,
        inside: &Region,
        shape: &Dims,
        target: &TensorView,
    ) -> Result<(), PieceError> {
        let element = target.dtype().size();
        // Both are in row-major order, so one loop advances through ranges of the piece's elements
        // and ranges of memory.
        let mut memory = target.runs();
        let mut room = memory.next().unwrap_or_default();
        for (mut at, mut len) in inside.runs_in(shape) {
            while len > 0 {
                if room.is_empty() {
                    room = memory.next().ok_or_else(|| problem("its memory is too small"))?;
                }
                let fits = len.min((room.len() / element) as u64);
                let mut start = room.start;
                for inner in boxes(source.sizes(), at..at + fits) {
                    let region = inner.translate(source.offsets()).map_err(problem)?;
                    let view = TensorView::contiguous(
                        target.memory().clone(),
                        target.dtype(),
                        region.sizes().clone(),
                        start,
                    )?;
                    start += usize::try_from(view.byte_len()).map_err(problem)?;
                    self.source_box(part, entry, &region, &view)?;
                }
                room.start = start;
                at += fits;
                len -= fits;
            }
        }
        Ok(())
    }

    async fn read(self) -> Result<ReadReport, CheckpointError> {
        let sink: Arc<dyn DataSink> = Arc::new(Slots { slots: self.slots, sink: self.sink });
        let mut report = ReadReport::default();
        for (part, plan) in self.parts.iter().zip(self.plans) {
            if plan.items.is_empty() {
                continue;
            }
            report += part.reader.read(&part.metadata, &plan, Arc::clone(&sink)).await?;
        }
        Ok(report)
    }
}

/// The box `inside` of a piece as a box of its origin, and for each axis of the origin the axis of
/// the piece.
fn in_source(
    inside: &Region,
    region: &Region,
    axes: &[Option<usize>],
) -> Result<(Region, Vec<Option<usize>>), dcp_core::region::RegionError> {
    let (mut offsets, mut sizes) = (region.offsets().clone(), region.sizes().clone());
    let mut back = vec![None; region.ndim()];
    for (here, axis) in axes.iter().enumerate() {
        let Some(axis) = *axis else { continue };
        offsets[axis] += inside.offsets()[here];
        sizes[axis] = inside.sizes()[here];
        back[axis] = Some(here);
    }
    Ok((Region::new(offsets, sizes)?, back))
}

fn fill_with_zeros(target: &TensorView) -> Result<(), PieceError> {
    let whole = Region::full(target.shape().clone()).map_err(problem)?;
    let zeros = vec![0; usize::try_from(target.byte_len().min(SCRATCH)).map_err(problem)?];
    for part in pieces(&whole, target.dtype().size(), SCRATCH) {
        let view = target.narrow(&part.map_err(problem)?)?;
        let zeros = zeros.get(..usize::try_from(view.byte_len()).map_err(problem)?);
        let zeros = zeros.ok_or_else(|| problem("an element is larger than the scratch"))?;
        view.fill_from(zeros).map_err(problem)?;
    }
    Ok(())
}

/// Assigns every item of a part its destination.
#[derive(Debug)]
struct Slots {
    slots: Vec<Slot>,
    sink: Arc<dyn DataSink>,
}

impl Slots {
    fn slot(&self, item: &ReadItem) -> Result<&Slot, CheckpointError> {
        let slot = self.slots.get(item.leaf as usize);
        slot.ok_or_else(|| item.unrequested().into())
    }
}

/// The caller's item for the region that the reader reports, which may be a part of it.
fn requested(item: &ReadItem, read: &ReadItem) -> ReadItem {
    ReadItem { entry: item.entry, leaf: item.leaf, kind: read.kind.clone() }
}

impl DataSink for Slots {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        match (self.slot(item)?, &item.kind) {
            (Slot::Passed(passed), _) => self.sink.destination(&requested(passed, item)),
            (Slot::Piece(offsets, view), ReadKind::Tensor { region, .. }) => {
                let inside = region.relative_to(offsets);
                let inside = inside.ok_or_else(|| item.unrequested())?;
                Ok(view.narrow(&inside)?)
            }
            _ => Err(item.unrequested().into()),
        }
    }

    fn commit(&self, item: &ReadItem) -> Result<(), CheckpointError> {
        match self.slot(item)? {
            Slot::Passed(passed) => self.sink.commit(&requested(passed, item)),
            Slot::Piece(..) => Ok(()),
        }
    }

    fn object(&self, item: &ReadItem, value: Value) -> Result<(), CheckpointError> {
        match self.slot(item)? {
            Slot::Passed(passed) => self.sink.object(passed, value),
            Slot::Piece(..) => Err(item.unrequested().into()),
        }
    }
}
