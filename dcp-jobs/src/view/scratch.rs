//! Reads parts of a tensor into a view's own memory.

use std::sync::Arc;

use bytes::Bytes;
use dcp_core::checkpoint::{DataSink, ReadReport};
use dcp_core::error::{ChunksProblem, TensorError};
use dcp_core::plan::{LoadPlan, ReadItem, ReadKind};
use dcp_core::region::RegionError;
use dcp_core::{
    CheckpointError, CheckpointMetadata, DType, HostMemory, PlanError, Region, StorageReader,
    TensorView, Value,
};

use crate::error::ReadRefusal;
use crate::read::runs::boxes;

/// The maximum number of bytes per read.
pub(super) const SCRATCH: u64 = 2 << 20;

/// Cuts `region`, of elements of `element_bytes` each, into boxes of at most `bytes` each.
pub(super) fn pieces(
    region: &Region,
    element_bytes: usize,
    bytes: u64,
) -> impl Iterator<Item = Result<Region, RegionError>> + use<> {
    let (offsets, sizes) = (region.offsets().clone(), region.sizes().clone());
    let total = region.volume();
    let step = (bytes / element_bytes.max(1) as u64).max(1);
    let starts = (0..total.div_ceil(step)).map(move |at| at * step);
    starts.flat_map(move |start| {
        let found = boxes(&sizes, start..start.saturating_add(step).min(total));
        found.into_iter().map(|inner| inner.translate(&offsets)).collect::<Vec<_>>()
    })
}

/// Parts of chunks to read together.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    plan: LoadPlan,
    places: Vec<(DType, Region, usize)>,
    len: usize,
}

impl Scratch {
    /// The total size of the parts in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// Adds `region` of a chunk of `dtype`.
    pub(super) fn push(&mut self, entry: u32, chunk: u32, dtype: DType, region: Region) {
        let leaf = u32::try_from(self.places.len()).unwrap_or(u32::MAX);
        let bytes = usize::try_from(region.volume()).unwrap_or(usize::MAX);
        self.places.push((dtype, region.clone(), self.len));
        self.len = self.len.saturating_add(bytes.saturating_mul(dtype.size()));
        let kind = ReadKind::Tensor { chunk, shard: 0, region };
        self.plan.items.push(ReadItem { entry, leaf, kind });
    }

    /// Reads the parts. Returns their row-major elements, concatenated.
    pub(super) async fn read(
        self,
        reader: &dyn StorageReader,
        metadata: &Arc<CheckpointMetadata>,
    ) -> Result<(Vec<Bytes>, ReadReport), CheckpointError> {
        let memory = HostMemory::try_zeroed(self.len).ok_or_else(|| TensorError::OutOfMemory {
            what: "parts of chunks".into(),
            byte_len: self.len(),
        })?;
        let mut views = Vec::with_capacity(self.places.len());
        for (dtype, region, at) in &self.places {
            let sizes = region.sizes().clone();
            views.push(TensorView::contiguous(memory.clone(), *dtype, sizes, *at)?);
        }
        let report = reader.read(metadata, &self.plan, Arc::new(Views(views))).await?;
        let fqn = || name(metadata, self.plan.items.first().map_or(0, |item| item.entry));
        let bytes = memory
            .read()
            .map_err(|source| CheckpointError::Memory { fqn: fqn().to_string(), source })?;
        let ends = self.places.iter().skip(1).map(|(_, _, at)| *at).chain([self.len]);
        let parts = self.places.iter().zip(ends).map(|((_, _, at), end)| bytes.slice(*at..end));
        Ok((parts.collect(), report))
    }
}

/// The name of an entry, for errors.
pub(super) fn name(metadata: &CheckpointMetadata, entry: u32) -> Arc<str> {
    metadata
        .at(entry as usize)
        .map_or_else(|| metadata.entry_name(entry as usize).into(), |(fqn, _)| Arc::clone(fqn))
}

/// A region of `fqn` cannot be computed.
pub(super) fn invalid_region(fqn: &str, error: RegionError) -> CheckpointError {
    PlanError::from(error).with_fqn(fqn).into()
}

/// `region` of `fqn` is not a part of `bounds`.
pub(super) fn outside(fqn: &str, region: &Region, bounds: &Region) -> CheckpointError {
    let (region, bounds) = (region.to_string(), bounds.to_string());
    ChunksProblem::Outside { region, bounds, rank: None }.of(fqn).into()
}

pub(super) fn not_a_tensor(fqn: &str) -> CheckpointError {
    PlanError::not_a_tensor(fqn).into()
}

/// A plan refers to an entry that the view does not have.
pub(super) fn no_entry(entry: u32) -> CheckpointError {
    PlanError::no_entry(entry.into(), None).into()
}

/// The reader returned without the value of an object.
pub(super) fn unread(fqn: &str) -> CheckpointError {
    PlanError::unread(fqn, "the value").into()
}

/// A tensor cannot be made from its pieces.
pub(super) fn assembly(fqn: &str, problem: impl Into<String>) -> CheckpointError {
    ReadRefusal::Assembly { key: fqn.to_owned(), problem: problem.into() }.into()
}

/// Memory of the parts, by the leaf of their items.
#[derive(Debug)]
struct Views(Vec<TensorView>);

impl DataSink for Views {
    fn destination(&self, item: &ReadItem) -> Result<TensorView, CheckpointError> {
        let view = self.0.get(item.leaf as usize).cloned();
        view.ok_or_else(|| item.unrequested().into())
    }

    fn commit(&self, _item: &ReadItem) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn object(&self, item: &ReadItem, _value: Value) -> Result<(), CheckpointError> {
        Err(item.unrequested().into())
    }
}
