//! Takes every n-th element of a tensor, forwards or backwards.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::plan::{LoadPlan, ReadKind};
use dcp_core::region::RegionError;
use dcp_core::{CheckpointError, CheckpointMetadata, Dims, PlanError, Region, StorageReader};

use crate::element::slice::{Axis, TensorSlice};
use crate::read::tensor_read::TensorReader;

use super::scratch::{invalid_region, outside, pieces};

/// The number of elements to gather at once; each may need a box.
const AT_ONCE: u64 = 1 << 16;
/// The largest step along the last axis at which skipped elements are read and discarded.
const DENSE: u64 = 8;

/// A reader of one tensor: a slice of a tensor of another reader.
pub(crate) struct Stepped {
    inner: Arc<TensorReader>,
    metadata: Arc<CheckpointMetadata>,
    axes: Vec<Axis>,
}

impl Stepped {
    /// Presents the slice of `inner` as a tensor.
    pub(crate) fn reader(
        inner: &Arc<TensorReader>,
        slice: &TensorSlice,
    ) -> Result<TensorReader, CheckpointError> {
        let fqn = inner.fqn();
        let mut shown = TensorEntry::new(inner.tensor()?.dtype, slice.shape.clone());
        let zeros = Dims::zeros(slice.shape.ndim());
        let pushed = shown.chunks.push(&zeros, &slice.shape, None);
        pushed.map_err(|error| PlanError::from(error).with_fqn(&**fqn))?;
        let mut metadata = CheckpointMetadata::new();
        metadata.insert(Arc::clone(fqn), Entry::Tensor(shown));
        let metadata = Arc::new(metadata);
        let view = Self {
            inner: Arc::clone(inner),
            metadata: Arc::clone(&metadata),
            axes: slice.axes.clone(),
        };
        TensorReader::new(Arc::new(view), metadata, 0)
    }

    /// The row-major elements of a part of the slice.
    async fn gather(&self, part: &Region, size: usize) -> Result<Bytes, CheckpointError> {
        let bad = |error: RegionError| invalid_region(self.inner.fqn(), error);
        let (boxes, row) = self.boxes(part).map_err(bad)?;
        let bytes = self.inner.read(&boxes).await?;
        let Some(Row { step, width, backwards }) = row else { return Ok(bytes) };
        let count = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let mut taken = Vec::with_capacity(bytes.len() / count(step).max(1));
        for row in bytes.chunks_exact(count(width).saturating_mul(size).max(1)) {
            let elements = row.chunks_exact(size).step_by(count(step).max(1));
            if backwards {
                elements.rev().for_each(|element| taken.extend_from_slice(element));
            } else {
                elements.for_each(|element| taken.extend_from_slice(element));
            }
        }
        Ok(taken.into())
    }

    /// The boxes of the tensor that contain a part of the slice, in its order, and the elements to
    /// take of each row if not all.
    fn boxes(&self, part: &Region) -> Result<(Vec<Region>, Option<Row>), RegionError> {
        let mut given = part.offsets().iter().zip(part.sizes().iter());
        let ranges: Vec<(u64, u64)> = self
            .axes
            .iter()
            .map(|axis| if axis.indexed { None } else { given.next() })
            .map(|range| range.map_or((0, 1), |(start, len)| (*start, *len)))
            .collect();
        // All axes up to the last one with a step are enumerated.
        let stepped = self.axes.iter().rposition(|axis| axis.step != 1);
        let last = self.axes.len().saturating_sub(1);
        let dense = |axis: &Axis| axis.step.unsigned_abs() <= DENSE;
        let row = match (self.axes.last(), ranges.last()) {
            (Some(axis), Some((_, count))) if stepped == Some(last) && dense(axis) => {
                let step = axis.step.unsigned_abs();
                let width = count.saturating_sub(1) * step + 1;
                Some(Row { step, width, backwards: axis.step < 0 })
            }
            _ => None,
        };
        let single = if row.is_some() { last } else { stepped.map_or(0, |axis| axis + 1) };
        let total: u64 = ranges.iter().take(single).map(|(_, len)| *len).product();
        let boxes = (0..total).map(|mut at| {
            let mut offsets = vec![0; self.axes.len()];
            let mut sizes = vec![1; self.axes.len()];
            for (n, (axis, (start, len))) in self.axes.iter().zip(&ranges).enumerate().rev() {
                if n < single {
                    offsets[n] = axis.index(start + at % len);
                    at /= len;
                } else {
                    let ends = (axis.index(*start), axis.index(start + len.saturating_sub(1)));
                    offsets[n] = ends.0.min(ends.1);
                    sizes[n] = if *len == 0 { 0 } else { ends.0.abs_diff(ends.1) + 1 };
                }
            }
            Region::new(offsets, sizes)
        });
        Ok((boxes.collect::<Result<_, _>>()?, row))
    }
}

/// The elements to take of each row.
#[derive(Clone, Copy, Debug)]
struct Row {
    step: u64,
    width: u64,
    backwards: bool,
}

#[async_trait]
impl StorageReader for Stepped {
    async fn metadata(&self) -> Result<Arc<CheckpointMetadata>, CheckpointError> {
        Ok(Arc::clone(&self.metadata))
    }

    async fn read(
        &self,
        _metadata: &Arc<CheckpointMetadata>,
        plan: &LoadPlan,
        sink: Arc<dyn DataSink>,
    ) -> Result<ReadReport, CheckpointError> {
        let fqn = self.inner.fqn();
        let failed = |source| CheckpointError::Memory { fqn: fqn.to_string(), source };
        let size = self.inner.tensor()?.dtype.size();
        let mut report = ReadReport::default();
        for item in &plan.items {
            let ReadKind::Tensor { region, .. } = &item.kind else {
                return Err(PlanError::not_an_object(fqn.to_string()).into());
            };
            let view = sink.destination(item)?;
            for piece in pieces(region, size, AT_ONCE * size as u64) {
                let piece = piece.map_err(|error| invalid_region(fqn, error))?;
                let bytes = self.gather(&piece, size).await?;
                let target = piece.relative_to(region.offsets());
                let target = target.ok_or_else(|| outside(fqn, &piece, region))?;
                view.narrow(&target)?.fill_from(&bytes).map_err(failed)?;
                report += ReadReport::new(bytes.len() as u64, bytes.len() as u64);
            }
            sink.commit(item)?;
        }
        Ok(report)
    }
}

impl fmt::Debug for Stepped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stepped").field("inner", &self.inner).field("axes", &self.axes).finish()
    }
}
