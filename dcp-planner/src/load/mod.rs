//! The default planner of loads.

mod chunks;

use std::collections::HashSet;
use std::sync::Arc;

use dcp_core::error::{ChunksProblem, StateProblem};
use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::plan::{LeafKind, LoadPlan, LoadReport, PlanContext, ReadItem, ReadKind, StateIndex};
use dcp_core::planner::LoadPlanner;
use dcp_core::{CheckpointMetadata, DType, Dims, PlanError, Region};

use crate::validate::invalid_index;
use chunks::Chunks;

/// Plans loads: every element that is wanted here is read once, from whichever chunk holds it,
/// however the checkpoint was sharded.
///
/// Names are compared by their text alone. Nothing is converted, and nothing is left as it was
/// silently: what is missing, of another shape, element type or kind, and how many elements
/// no chunk holds, is in the report. (PyTorch 2.15 casts silently, ignores names that are stored
/// but not wanted, and keeps old elements where a chunk is missing.) A chunk or object without
/// stored bytes counts as missing.
#[derive(Clone, Copy, Debug, Default)]
pub struct DefaultLoadPlanner;

impl DefaultLoadPlanner {
    /// A planner.
    #[must_use]
    pub fn new() -> Self {
        Self
    }
}

impl LoadPlanner for DefaultLoadPlanner {
    /// See [`DefaultLoadPlanner`]. Items are in the order of PyTorch 2.15: leaf by leaf, shards
    /// along the axis on which anything reaches furthest, and for each shard the chunks by their
    /// end there.
    ///
    /// # Errors
    ///
    /// [`StateProblem::Duplicate`] when a name is wanted twice, [`ChunksProblem::Overlap`] when
    /// stored chunks give different sources for one element, and [`ChunksProblem::Outside`] for
    /// shards that lie outside their tensor.
    fn local_plan(
        &self,
        wanted: &StateIndex,
        stored: &CheckpointMetadata,
        _context: &PlanContext,
    ) -> Result<(LoadPlan, LoadReport), PlanError> {
        let mut plan = LoadPlan::default();
        let mut report = LoadReport::default();
        let mut names = HashSet::with_capacity(wanted.leaves.len());
        for (position, leaf) in wanted.leaves.iter().enumerate() {
            let fqn = &leaf.fqn;
            if !names.insert(&**fqn) {
                return Err(StateProblem::Duplicate.of(fqn.to_string()));
            }
            let leaf_index = index(fqn, position)?;
            let found = stored.index_of(fqn).and_then(|at| Some((at, stored.at(at)?.1)));
            match (found, &leaf.kind) {
                (None, _) => report.missing.push(Arc::clone(fqn)),
                (Some((at, Entry::Object(object))), LeafKind::Object { .. }) => {
                    if object.placement.is_some() {
                        let entry = index(fqn, at)?;
                        plan.items.push(ReadItem {
                            entry,
                            leaf: leaf_index,
                            kind: ReadKind::Object,
                        });
                    } else {
                        report.missing.push(Arc::clone(fqn));
                    }
                }
                (
                    Some((at, Entry::Tensor(tensor))),
                    LeafKind::Tensor { dtype, shape, regions, .. },
                ) => {
                    if is_as_wanted(fqn, tensor, *dtype, shape, &mut report) {
                        let place = (index(fqn, at)?, leaf_index);
                        let absent = read_tensor(fqn, place, tensor, regions, &mut plan.items)?;
                        if absent > 0 {
                            report.uncovered.push((Arc::clone(fqn), absent));
                        }
                    }
                }
                (Some((_, entry)), _) => {
                    report.kinds.push((Arc::clone(fqn), entry.as_tensor().is_some()));
                }
            }
        }
        let unexpected = stored.iter().filter(|(fqn, _)| !names.contains(&***fqn));
        report.unexpected = unexpected.map(|(fqn, _)| Arc::clone(fqn)).collect();
        Ok((plan, report))
    }
}

fn is_as_wanted(
    fqn: &Arc<str>,
    tensor: &TensorEntry,
    dtype: DType,
    shape: &Dims,
    report: &mut LoadReport,
) -> bool {
    if tensor.shape != *shape {
        report.shapes.push((Arc::clone(fqn), tensor.shape.clone(), shape.clone()));
    }
    if tensor.dtype != dtype {
        report.dtypes.push((Arc::clone(fqn), tensor.dtype, dtype));
    }
    tensor.shape == *shape && tensor.dtype == dtype
}

/// Plans the shards of one tensor and returns how many of their elements are not stored.
fn read_tensor(
    fqn: &str,
    (entry, leaf): (u32, u32),
    tensor: &TensorEntry,
    shards: &[Region],
    items: &mut Vec<ReadItem>,
) -> Result<u64, PlanError> {
    let whole = Region::full(tensor.shape.clone())
        .map_err(|error| invalid_index(fqn, &error.to_string()))?;
    if let Some(outside) = shards.iter().find(|shard| !whole.contains(shard)) {
        return Err(ChunksProblem::Outside {
            region: outside.to_string(),
            bounds: format!("shape {}", tensor.shape),
            rank: None,
        }
        .of(fqn));
    }
    let chunks = Chunks::new(fqn, tensor, shards.len())?;
    let sweep = Chunks::sweep_axis(tensor, shards);
    let mut order: Vec<usize> = (0..shards.len()).collect();
    order.sort_by_key(|shard| sweep.map_or(0, |axis| shards[*shard].offsets()[axis]));
    let mut absent = 0_u64;
    for shard in order {
        let hits = chunks.within(fqn, &shards[shard], sweep)?;
        // Disjoint parts of one box cannot have more elements than it.
        let found: u64 = hits.iter().map(|hit| hit.region.volume()).sum();
        absent = absent.saturating_add(shards[shard].volume().saturating_sub(found));
        for hit in hits {
            let kind = ReadKind::Tensor {
                chunk: index(fqn, hit.chunk)?,
                shard: index(fqn, shard)?,
                region: hit.region,
            };
            items.push(ReadItem { entry, leaf, kind });
        }
    }
    Ok(absent)
}

fn index(fqn: &str, position: usize) -> Result<u32, PlanError> {
    let what = || format!("the number of entries or chunks at {fqn:?}");
    u32::try_from(position)
        .map_err(|_| PlanError::TooLarge { what: what(), limit: u32::MAX.into() })
}
