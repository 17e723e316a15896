//! Regions in parts that fit into memory.

use dcp_core::{CheckpointError, PlanError, Region};

/// The number of elements that are computed at once.
pub(crate) const SEGMENT: u64 = 1 << 19;

/// Cuts a region into boxes of at most `most` elements, in row-major order.
pub(crate) fn blocks(region: &Region, most: u64) -> Result<Vec<Region>, CheckpointError> {
    let mut left = vec![region.clone()];
    let mut found = Vec::new();
    while let Some(next) = left.pop() {
        let axis = next.sizes().iter().position(|size| *size > 1);
        let (Some(axis), true) = (axis, next.volume() > most) else {
            if !next.is_empty() {
                found.push(next);
            }
            continue;
        };
        let (start, end) = (next.offsets()[axis], next.end(axis));
        let middle = start + (end - start) / 2;
        let part = |from: u64, to: u64| {
            let (mut offsets, mut sizes) = (next.offsets().clone(), next.sizes().clone());
            (offsets[axis], sizes[axis]) = (from, to - from);
            Region::new(offsets, sizes).map_err(PlanError::from)
        };
        left.push(part(middle, end)?);
        left.push(part(start, middle)?);
    }
    Ok(found)
}
