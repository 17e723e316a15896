//! Shapes, offsets and sizes: one number per axis.

use std::fmt;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

/// One unsigned number per axis, in elements: a shape, offsets or sizes.
///
/// Up to four axes need no allocation.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Dims(SmallVec<[u64; 4]>);

impl Dims {
    /// The maximum number of axes of a stored tensor: the limit of most PyTorch operations.
    pub const MAX_AXES: usize = 64;

    /// `ndim` zeros.
    #[must_use]
    pub fn zeros(ndim: usize) -> Self {
        Self(SmallVec::from_elem(0, ndim))
    }

    /// The number of axes.
    #[must_use]
    pub fn ndim(&self) -> usize {
        self.0.len()
    }

    /// The product of all axes (1 without axes); `None` if it exceeds `u64`.
    #[must_use]
    pub fn checked_volume(&self) -> Option<u64> {
        checked_volume(&self.0)
    }

    /// Row-major strides in elements; axes of length 0 count as 1, as in PyTorch.
    #[must_use]
    pub fn contiguous_strides(&self) -> Vec<i64> {
        let mut strides = vec![1_i64; self.ndim()];
        for axis in (0..self.ndim().saturating_sub(1)).rev() {
            let len = i64::try_from(self.0[axis + 1].max(1)).unwrap_or(i64::MAX);
            strides[axis] = strides[axis + 1].saturating_mul(len);
        }
        strides
    }
}

/// The product of `sizes` (1 when empty); `None` if it exceeds `u64`.
///
/// A zero makes the product zero, however large the other sizes are.
#[must_use]
pub fn checked_volume(sizes: &[u64]) -> Option<u64> {
    if sizes.contains(&0) {
        return Some(0);
    }
    sizes.iter().try_fold(1_u64, |volume, &size| volume.checked_mul(size))
}

impl Deref for Dims {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.0
    }
}

impl DerefMut for Dims {
    fn deref_mut(&mut self) -> &mut [u64] {
        &mut self.0
    }
}

impl From<&[u64]> for Dims {
    fn from(sizes: &[u64]) -> Self {
        Self(SmallVec::from_slice(sizes))
    }
}

impl From<Vec<u64>> for Dims {
    fn from(sizes: Vec<u64>) -> Self {
        Self(SmallVec::from_vec(sizes))
    }
}

impl<const N: usize> From<[u64; N]> for Dims {
    fn from(sizes: [u64; N]) -> Self {
        Self(SmallVec::from_slice(&sizes))
    }
}

/// Sizes as other libraries have them: `ndarray`'s and `candle`'s shapes.
impl From<&[usize]> for Dims {
    fn from(sizes: &[usize]) -> Self {
        sizes.iter().map(|size| *size as u64).collect()
    }
}

/// By reference: an array of plain numbers, such as `[4, 8]`, is one of `u64`.
impl<const N: usize> From<&[usize; N]> for Dims {
    fn from(sizes: &[usize; N]) -> Self {
        Self::from(&sizes[..])
    }
}

impl FromIterator<u64> for Dims {
    fn from_iter<I: IntoIterator<Item = u64>>(sizes: I) -> Self {
        Self(SmallVec::from_iter(sizes))
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter()).finish()
    }
}

impl fmt::Display for Dims {
    /// `[2, 3]`, as PyTorch prints a shape.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
