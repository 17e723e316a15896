//! The stored chunks of one tensor, found by place.

use std::borrow::Cow;

use dcp_core::error::ChunksProblem;
use dcp_core::metadata::TensorEntry;
use dcp_core::overlap::find_overlap;
use dcp_core::{PlanError, Region};

use crate::validate::invalid_index;

/// Wanted regions from which on sorting the chunks pays.
const WORTH_SORTING: usize = 3;

/// The usable chunks of a tensor: those with elements and with stored bytes.
///
/// With many wanted regions they are sorted along the axis on which they begin at the most
/// places, so that a region looks only at its neighborhood there.
pub(super) struct Chunks {
    chunks: Vec<(usize, Region)>,
    /// The axis they are sorted along, and the largest end of each and the chunks before it.
    sorted: Option<(usize, Vec<u64>)>,
}

/// A part of a chunk that is in a wanted region.
pub(super) struct Hit {
    pub(super) chunk: usize,
    pub(super) region: Region,
    /// The end of the chunk on PyTorch's sweep axis.
    pub(super) end: u64,
}

impl Chunks {
    pub(super) fn new(fqn: &str, tensor: &TensorEntry, wanted: usize) -> Result<Self, PlanError> {
        if tensor.chunks.ndim() != tensor.shape.ndim() {
            return Err(invalid_index(fqn, "its chunks and its shape differ in axes"));
        }
        let mut chunks = Vec::with_capacity(tensor.chunks.len());
        for (index, chunk) in tensor.chunks.iter().enumerate() {
            let region = chunk.region().map_err(|error| invalid_index(fqn, &error.to_string()))?;
            if chunk.placement.is_some() && !region.is_empty() {
                chunks.push((index, region));
            }
        }
        let sorted = (wanted >= WORTH_SORTING && chunks.len() >= WORTH_SORTING)
            .then(|| busiest_axis(&chunks, tensor.shape.ndim()))
            .flatten();
        let sorted = sorted.map(|axis| {
            chunks.sort_by_key(|(_, region)| region.offsets()[axis]);
            let mut furthest = 0;
            let ends = chunks.iter().map(|(_, region)| {
                furthest = region.end(axis).max(furthest);
                furthest
            });
            (axis, ends.collect())
        });
        Ok(Self { chunks, sorted })
    }

    /// The axis along which PyTorch sweeps (2.15): the first of those on which any box, stored or
    /// wanted, reaches furthest.
    pub(super) fn sweep_axis(tensor: &TensorEntry, wanted: &[Region]) -> Option<usize> {
        let mut extents = vec![0_u64; tensor.shape.ndim()];
        let stored = tensor.chunks.iter().map(|chunk| (chunk.offsets, chunk.sizes));
        let wanted = wanted.iter().map(|region| (&**region.offsets(), &**region.sizes()));
        for (offsets, sizes) in stored.chain(wanted) {
            for (extent, (offset, size)) in extents.iter_mut().zip(offsets.iter().zip(sizes)) {
                *extent = offset.saturating_add(*size).max(*extent);
            }
        }
        let furthest = extents.iter().max()?;
        extents.iter().position(|extent| extent == furthest)
    }

    /// Finds the stored parts of `wanted`, every element once, in PyTorch's order: by the end of the
    /// chunk on the sweep axis, then by its position. Of equal chunks the first is taken.
    pub(super) fn within(
        &self,
        fqn: &str,
        wanted: &Region,
        sweep: Option<usize>,
    ) -> Result<Vec<Hit>, PlanError> {
        let end_of = |region: &Region| sweep.map_or(0, |axis| region.end(axis));
        let mut hits: Vec<Hit> = self
            .near(wanted)
            .iter()
            .filter_map(|(chunk, region)| {
                let common = region.intersect(wanted)?;
                Some(Hit { chunk: *chunk, region: common, end: end_of(region) })
            })
            .collect();
        hits.sort_by(|a, b| (a.region.offsets(), a.chunk).cmp(&(b.region.offsets(), b.chunk)));
        hits.dedup_by(|later, first| later.region == first.region);
        let rows: Vec<_> =
            hits.iter().map(|hit| (&**hit.region.offsets(), &**hit.region.sizes())).collect();
        match find_overlap(&rows) {
            Ok(None) => {}
            Ok(Some((a, b))) => {
                let (a, b) = (hits[a].chunk.min(hits[b].chunk), hits[a].chunk.max(hits[b].chunk));
                return Err(ChunksProblem::Overlap {
                    first: format!("{} (number {a})", self.shown(a)),
                    second: format!("{} (number {b})", self.shown(b)),
                }
                .of(fqn));
            }
            Err(_) => return Err(invalid_index(fqn, "its chunks are too irregular to be checked")),
        }
        hits.sort_by_key(|hit| (hit.end, hit.chunk));
        Ok(hits)
    }

    fn shown(&self, chunk: usize) -> Cow<'static, str> {
        let found = self.chunks.iter().find(|(index, _)| *index == chunk);
        found.map_or(Cow::Borrowed("a chunk"), |(_, region)| Cow::Owned(format!("chunk {region}")))
    }

    fn near(&self, wanted: &Region) -> &[(usize, Region)] {
        let Some((axis, ends)) = &self.sorted else { return &self.chunks };
        if wanted.is_empty() {
            return &[];
        }
        let from = ends.partition_point(|end| *end <= wanted.offsets()[*axis]);
        let to =
            self.chunks.partition_point(|(_, region)| region.offsets()[*axis] < wanted.end(*axis));
        self.chunks.get(from..to).unwrap_or_default()
    }
}

/// The axis on which the chunks begin at the most different places.
fn busiest_axis(chunks: &[(usize, Region)], ndim: usize) -> Option<usize> {
    let places = |axis: usize| {
        let mut starts: Vec<u64> =
            chunks.iter().map(|(_, region)| region.offsets()[axis]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    (0..ndim).max_by_key(|axis| (places(*axis), std::cmp::Reverse(*axis)))
}
