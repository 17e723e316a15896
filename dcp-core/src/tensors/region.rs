//! Boxes of elements: the only geometry type.
//!
//! Resharding, validation, read coalescing and the command's shard map all use [`Region`]. Numbers
//! are elements per axis; bytes appear only in [`Region::runs_in`].

use std::fmt;
use std::ops::Range;

use crate::tensors::dims::{Dims, checked_volume};

/// An axis-aligned box of elements inside a tensor.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region {
    offsets: Dims,
    sizes: Dims,
}

/// An invalid box: its lists differ in length, or it ends past `u64`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The two lists have different lengths.
    #[error("{offsets} offsets but {sizes} sizes")]
    Axes {
        /// The length of the list of offsets.
        offsets: usize,
        /// The length of the list of sizes.
        sizes: usize,
    },
    /// A range of an axis ends before it begins.
    #[error("range {begin}..{end} of axis {axis} ends before it begins")]
    Reversed {
        /// The axis.
        axis: usize,
        /// The begin of the range.
        begin: u64,
        /// The end of the range.
        end: u64,
    },
    /// An end, or the number of elements, exceeds 64 bits.
    #[error("box at {offsets} of sizes {sizes} exceeds 64 bits")]
    Overflow {
        /// The offsets as given.
        offsets: Dims,
        /// The sizes as given.
        sizes: Dims,
    },
}

impl Region {
    /// A box at `offsets` of `sizes`.
    ///
    /// # Errors
    ///
    /// When the lists differ in length, or an end or the volume exceeds `u64`.
    pub fn new(offsets: impl Into<Dims>, sizes: impl Into<Dims>) -> Result<Self, RegionError> {
        let (offsets, sizes) = (offsets.into(), sizes.into());
        if offsets.ndim() != sizes.ndim() {
            return Err(RegionError::Axes { offsets: offsets.ndim(), sizes: sizes.ndim() });
        }
        let ends_fit = offsets.iter().zip(&*sizes).all(|(o, s)| o.checked_add(*s).is_some());
        if !ends_fit || checked_volume(&sizes).is_none() {
            return Err(RegionError::Overflow { offsets, sizes });
        }
        Ok(Self { offsets, sizes })
    }

    /// The region of a whole tensor of `shape`.
    ///
    /// # Errors
    ///
    /// When the volume exceeds `u64`.
    pub fn full(shape: impl Into<Dims>) -> Result<Self, RegionError> {
        let sizes = shape.into();
        Self::new(Dims::zeros(sizes.ndim()), sizes)
    }

    /// The elements in a range of each axis.
    ///
    /// ```
    /// use dcp_core::Region;
    /// let half = Region::of_ranges([2..4, 0..8])?;
    /// assert_eq!((&half.offsets()[..], &half.sizes()[..]), (&[2, 0][..], &[2, 8][..]));
    /// # Ok::<(), dcp_core::region::RegionError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When a range ends before it begins, or the volume exceeds `u64`.
    pub fn of_ranges(ranges: impl IntoIterator<Item = Range<u64>>) -> Result<Self, RegionError> {
        let (mut offsets, mut sizes) = (Vec::new(), Vec::new());
        for (axis, Range { start: begin, end }) in ranges.into_iter().enumerate() {
            let reversed = RegionError::Reversed { axis, begin, end };
            offsets.push(begin);
            sizes.push(end.checked_sub(begin).ok_or(reversed)?);
        }
        Self::new(offsets, sizes)
    }

    /// The offset, per axis.
    #[must_use]
    pub fn offsets(&self) -> &Dims {
        &self.offsets
    }

    /// The size, per axis.
    #[must_use]
    pub fn sizes(&self) -> &Dims {
        &self.sizes
    }

    /// The number of axes.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.sizes.ndim()
    }

    /// The end (exclusive) on `axis`.
    #[must_use]
    pub fn end(&self, axis: usize) -> u64 {
        self.offsets[axis] + self.sizes[axis]
    }

    /// The number of elements; 1 for a box without axes.
    #[must_use]
    pub fn volume(&self) -> u64 {
        // Only a box with elements has a volume that was checked.
        self.sizes.checked_volume().unwrap_or(0)
    }

    /// Whether the box has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sizes.contains(&0)
    }

    /// The intersection of two boxes; `None` when they share no element.
    #[must_use]
    pub fn intersect(&self, other: &Region) -> Option<Region> {
        if self.ndim() != other.ndim() {
            return None;
        }
        let mut common =
            Region { offsets: Dims::zeros(self.ndim()), sizes: Dims::zeros(self.ndim()) };
        for axis in 0..self.ndim() {
            let start = self.offsets[axis].max(other.offsets[axis]);
            let end = self.end(axis).min(other.end(axis));
            if start >= end {
                return None;
            }
            common.offsets[axis] = start;
            common.sizes[axis] = end - start;
        }
        Some(common)
    }

    /// Whether this box contains every element of `inner`. An empty box is contained if its corners
    /// are.
    #[must_use]
    pub fn contains(&self, inner: &Region) -> bool {
        self.ndim() == inner.ndim()
            && (0..self.ndim()).all(|axis| {
                self.offsets[axis] <= inner.offsets[axis] && inner.end(axis) <= self.end(axis)
            })
    }

    /// The box in coordinates relative to `origin`, which must not exceed its offsets.
    ///
    /// Returns `None` if an offset would become negative or the number of axes differs.
    #[must_use]
    pub fn relative_to(&self, origin: &[u64]) -> Option<Region> {
        if origin.len() != self.ndim() {
            return None;
        }
        let offsets = self
            .offsets
            .iter()
            .zip(origin)
            .map(|(offset, origin)| offset.checked_sub(*origin))
            .collect::<Option<Dims>>()?;
        Some(Region { offsets, sizes: self.sizes.clone() })
    }

    /// The box moved by `by` elements per axis.
    ///
    /// # Errors
    ///
    /// When the number of axes differs or an end exceeds `u64`.
    pub fn translate(&self, by: &[u64]) -> Result<Region, RegionError> {
        if by.len() != self.ndim() {
            return Err(RegionError::Axes { offsets: by.len(), sizes: self.ndim() });
        }
        let overflow =
            || RegionError::Overflow { offsets: self.offsets.clone(), sizes: self.sizes.clone() };
        let offsets = self
            .offsets
            .iter()
            .zip(by)
            .map(|(offset, by)| offset.checked_add(*by))
            .collect::<Option<Dims>>()
            .ok_or_else(overflow)?;
        Region::new(offsets, self.sizes.clone())
    }

    /// The contiguous runs of this box in a row-major array of `shape`: `(first element, number of
    /// elements)`, ascending, adjacent runs merged.
    ///
    /// The box must be inside `shape`. An empty box has no runs; a box without axes has one run of
    /// one element.
    #[must_use]
    pub fn runs_in(&self, shape: &[u64]) -> Runs {
        Runs::new(self, shape)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Region {
    /// `[0:2, 4:8]`, half-open per axis.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for axis in 0..self.ndim() {
            let separator = if axis == 0 { "" } else { ", " };
            write!(f, "{separator}{}:{}", self.offsets[axis], self.end(axis))?;
        }
        f.write_str("]")
    }
}

/// Iterator over contiguous runs, from [`Region::runs_in`].
#[derive(Clone, Debug)]
pub struct Runs {
    /// Axes that are iterated index by index, outermost first: (size, stride).
    outer: Vec<(u64, u64)>,
    index: Vec<u64>,
    next: u64,
    run: u64,
    left: u64,
}

impl Runs {
    fn new(region: &Region, shape: &[u64]) -> Self {
        debug_assert_eq!(region.ndim(), shape.len(), "box and array differ in axes");
        if region.is_empty() {
            return Self { outer: Vec::new(), index: Vec::new(), next: 0, run: 0, left: 0 };
        }
        let ndim = shape.len();
        let mut stride = 1_u64;
        let mut strides = vec![1_u64; ndim];
        for axis in (0..ndim).rev() {
            strides[axis] = stride;
            stride = stride.saturating_mul(shape[axis].max(1));
        }
        // Axes that the box covers fully merge with the axis before them into one run.
        let mut split = ndim;
        let mut run = 1_u64;
        while split > 0 {
            split -= 1;
            run = run.saturating_mul(region.sizes[split]);
            if region.sizes[split] != shape[split] {
                break;
            }
        }
        let outer: Vec<_> = (0..split).map(|axis| (region.sizes[axis], strides[axis])).collect();
        let next = region
            .offsets
            .iter()
            .zip(&strides)
            .map(|(o, s)| o.saturating_mul(*s))
            .fold(0, u64::saturating_add);
        let left = outer.iter().map(|(size, _)| *size).fold(1, u64::saturating_mul);
        Self { index: vec![0; outer.len()], outer, next, run, left }
    }

    /// The number of elements in each run; all runs have one length. 0 without runs.
    #[must_use]
    pub fn run_len(&self) -> u64 {
        self.run
    }

    /// The number of runs not yet yielded.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.left
    }
}

impl Iterator for Runs {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let start = self.next;
        for axis in (0..self.outer.len()).rev() {
            let (size, stride) = self.outer[axis];
            self.index[axis] += 1;
            self.next += stride;
            if self.index[axis] < size {
                break;
            }
            self.next -= size * stride;
            self.index[axis] = 0;
        }
        Some((start, self.run))
    }

    /// In constant time.
    fn nth(&mut self, n: usize) -> Option<(u64, u64)> {
        let skipped = n as u64;
        if skipped >= self.left {
            self.left = 0;
            return None;
        }
        self.left -= skipped;
        // The index of the run, as a number whose digits are the indices of the axes.
        let mut carry = skipped;
        for ((size, stride), index) in self.outer.iter().zip(&mut self.index).rev() {
            let at = *index + carry;
            self.next = self.next - *index * stride + at % size * stride;
            (*index, carry) = (at % size, at / size);
        }
        self.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], sizes: &[u64]) -> Region {
        Region::new(offsets, sizes).unwrap()
    }

    #[test]
    fn intersect_is_symmetric_and_exact() {
        let a = region(&[0, 2], &[4, 4]);
        let b = region(&[2, 0], &[4, 4]);
        assert_eq!(a.intersect(&b), Some(region(&[2, 2], &[2, 2])));
        assert_eq!(a.intersect(&b), b.intersect(&a));
        assert_eq!(a.intersect(&region(&[4, 2], &[1, 1])), None);
        assert_eq!(region(&[], &[]).intersect(&region(&[], &[])), Some(region(&[], &[])));
    }

    #[test]
    fn runs_merge_whole_axes() {
        let runs =
            |o: &[u64], s: &[u64], shape: &[u64]| region(o, s).runs_in(shape).collect::<Vec<_>>();
        assert_eq!(runs(&[1, 0], &[2, 4], &[5, 4]), [(4, 8)]);
        assert_eq!(runs(&[1, 1], &[2, 2], &[5, 4]), [(5, 2), (9, 2)]);
        assert_eq!(runs(&[], &[], &[]), [(0, 1)]);
        assert_eq!(runs(&[0, 0], &[0, 4], &[5, 4]), []);
        let huge = [1 << 40, 1 << 40, 0];
        assert_eq!(runs(&[0, 0, 0], &huge, &huge), []);
        assert_eq!(region(&[0, 0, 0], &huge).volume(), 0);
        assert_eq!(runs(&[0, 1, 0], &[2, 1, 3], &[2, 2, 3]), [(3, 3), (9, 3)]);
    }

    #[test]
    fn runs_equal_a_plain_walk() {
        let shape = [3_u64, 4, 2, 3];
        let inner = region(&[1, 0, 1, 1], &[2, 3, 1, 2]);
        let mut walked = Vec::new();
        for a in 1..3 {
            for b in 0..3 {
                for c in 1..2 {
                    for d in 1..3 {
                        walked.push(((a * 4 + b) * 2 + c) * 3 + d);
                    }
                }
            }
        }
        let ran: Vec<u64> = inner.runs_in(&shape).flat_map(|(at, n)| at..at + n).collect();
        assert_eq!(ran, walked);
    }

    #[test]
    fn skipped_runs_are_those_of_a_walk() {
        let inner = region(&[1, 0, 1, 1], &[2, 3, 2, 2]);
        let all: Vec<_> = inner.runs_in(&[3, 4, 4, 3]).collect();
        for first in 0..=all.len() + 1 {
            for second in 0..=all.len() {
                let mut runs = inner.runs_in(&[3, 4, 4, 3]);
                assert_eq!(runs.nth(first), all.get(first).copied());
                assert_eq!(runs.nth(second), all.get(first + 1 + second).copied());
            }
        }
    }

    #[test]
    fn bad_boxes_are_refused() {
        assert!(Region::new([0], [1, 2]).is_err());
        assert!(Region::new([u64::MAX], [1]).is_err());
        assert!(Region::full([1 << 40, 1 << 40]).is_err());
        assert!(Region::full([1 << 40, 1 << 40, 0]).is_ok());
    }
}
