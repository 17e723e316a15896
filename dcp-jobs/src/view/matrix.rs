//! Splits a region into matrices: its last two axes, at each index of the others.

use std::ops::Range;

use dcp_core::region::RegionError;
use dcp_core::{Dims, Region};

/// The rows and columns of a region at one index of all other axes.
pub(super) struct Matrix {
    pub(super) outer: Dims,
    ndim: usize,
    /// The first row, and the end of the rows.
    pub(super) rows: (u64, u64),
    /// The first column, and the end of the columns.
    pub(super) cols: (u64, u64),
}

impl Matrix {
    pub(super) fn of(region: &Region, outer: Dims) -> Self {
        let ndim = region.ndim();
        let axis = |back: usize| match ndim.checked_sub(back) {
            Some(axis) => (region.offsets()[axis], region.end(axis)),
            None => (0, 1),
        };
        Self { outer, ndim, rows: axis(2), cols: axis(1) }
    }

    /// The region of some rows and columns.
    pub(super) fn part(&self, rows: Range<u64>, cols: Range<u64>) -> Result<Region, RegionError> {
        let inner = [rows, cols];
        let inner = inner.iter().skip(2_usize.saturating_sub(self.ndim));
        let offsets: Dims =
            self.outer.iter().copied().chain(inner.clone().map(|range| range.start)).collect();
        let sizes: Dims = self
            .outer
            .iter()
            .map(|_| 1)
            .chain(inner.map(|range| range.end - range.start))
            .collect();
        Region::new(offsets, sizes)
    }
}

/// All indices of a region on the axes before the last two; none when it is empty.
pub(super) fn outer_indices(region: &Region) -> impl Iterator<Item = Dims> + use<> {
    let axes = region.ndim().saturating_sub(2);
    let (offsets, sizes): (Dims, Dims) = (
        region.offsets().iter().take(axes).copied().collect(),
        region.sizes().iter().take(axes).copied().collect(),
    );
    let count = if region.is_empty() { 0 } else { sizes.checked_volume().unwrap_or(0) };
    (0..count).map(move |mut at| {
        let mut index = offsets.clone();
        for axis in (0..axes).rev() {
            index[axis] += at % sizes[axis];
            at /= sizes[axis];
        }
        index
    })
}

/// Exchanges the last two axes.
pub(super) fn exchange(axes: &mut [u64]) {
    if let [.., rows, cols] = axes {
        std::mem::swap(rows, cols);
    }
}

/// Transposes a matrix of `float32` whose rows have `width` elements.
pub(super) fn transposed(numbers: &[u8], width: u64) -> Vec<u8> {
    let width = usize::try_from(width).unwrap_or(0).max(1);
    let (elements, _) = numbers.as_chunks::<4>();
    let mut made = Vec::with_capacity(numbers.len());
    for col in 0..width {
        for element in elements.iter().skip(col).step_by(width) {
            made.extend_from_slice(element);
        }
    }
    made
}
