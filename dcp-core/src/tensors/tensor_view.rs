//! Boxes of elements in memory, by strides.

use crate::tensors::dims::Dims;
use crate::tensors::dtype::DType;
use crate::tensors::error::TensorError;
use crate::tensors::memory::{Buffer, HostMemory, LoanError};
use crate::tensors::payload::Payload;
use crate::tensors::region::Region;

/// A box of elements laid out in memory by strides.
#[derive(Clone, Debug)]
pub struct TensorView {
    memory: HostMemory,
    dtype: DType,
    shape: Dims,
    /// In elements, one per axis.
    strides: Vec<u64>,
    byte_offset: usize,
}

impl TensorView {
    /// A row-major view of `shape` from `byte_offset`.
    ///
    /// # Errors
    ///
    /// When it exceeds the memory.
    pub fn contiguous(
        memory: HostMemory,
        dtype: DType,
        shape: impl Into<Dims>,
        byte_offset: usize,
    ) -> Result<Self, TensorError> {
        let shape = shape.into();
        let strides =
            shape.contiguous_strides().into_iter().map(|s| u64::try_from(s).unwrap_or(0)).collect();
        Self::strided(memory, dtype, shape, strides, byte_offset)
    }

    /// A view of `shape` with `strides` (in elements) from `byte_offset`.
    ///
    /// # Errors
    ///
    /// When the number of strides is wrong, or an element is outside the memory.
    pub fn strided(
        memory: HostMemory,
        dtype: DType,
        shape: impl Into<Dims>,
        strides: Vec<u64>,
        byte_offset: usize,
    ) -> Result<Self, TensorError> {
        let shape = shape.into();
        if strides.len() != shape.ndim() {
            return Err(TensorError::Invalid {
                fqn: None,
                problem: format!("{} strides for a view of shape {shape}", strides.len()),
            });
        }
        let end = view_end(dtype, &shape, &strides, byte_offset);
        if end.is_none_or(|end| end > memory.len() as u64) {
            let (end, len) = (end.unwrap_or(u64::MAX), memory.len());
            let problem = format!("a view of shape {shape} ends at byte {end} of {len}");
            return Err(TensorError::Invalid { fqn: None, problem });
        }
        Ok(Self { memory, dtype, shape, strides, byte_offset })
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements per axis.
    #[must_use]
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// The size of all elements in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.shape.checked_volume().unwrap_or(0) * self.dtype.size() as u64
    }

    /// The part `region` of this view, in the view's coordinates.
    ///
    /// # Errors
    ///
    /// When the region is outside the view.
    pub fn narrow(&self, region: &Region) -> Result<Self, TensorError> {
        let whole = full(&self.shape)?;
        if !whole.contains(region) {
            let problem = format!("region {region} is outside shape {}", self.shape);
            return Err(TensorError::Invalid { fqn: None, problem });
        }
        let byte_offset = if region.is_empty() {
            self.byte_offset
        } else {
            let skipped: u64 = region.offsets().iter().zip(&self.strides).map(|(o, s)| o * s).sum();
            // It fits: the constructor checked later elements against the memory.
            self.byte_offset + skipped as usize * self.dtype.size()
        };
        Ok(Self {
            memory: self.memory.clone(),
            dtype: self.dtype,
            shape: region.sizes().clone(),
            strides: self.strides.clone(),
            byte_offset,
        })
    }

    /// Permutes, adds and drops axes: axis `i` of the result is axis `axes[i]` of this view, or has size 1
    /// if that is `None`. The elements are the same.
    ///
    /// # Errors
    ///
    /// When an axis is named twice or does not exist, or an axis with a size other than 1 is not
    /// named.
    pub fn with_axes(&self, axes: &[Option<usize>]) -> Result<Self, TensorError> {
        let refuse = |problem: String| TensorError::Invalid { fqn: None, problem };
        let mut named = vec![false; self.shape.ndim()];
        let (mut shape, mut strides) = (Vec::new(), Vec::new());
        for axis in axes {
            let (size, stride) = match *axis {
                None => (1, 0),
                Some(axis) => {
                    let is_free = named.get(axis) == Some(&false);
                    if !is_free {
                        let problem = format!("axis {axis} of {} cannot be taken", self.shape);
                        return Err(refuse(problem));
                    }
                    named[axis] = true;
                    (self.shape[axis], self.strides[axis])
                }
            };
            shape.push(size);
            strides.push(stride);
        }
        if named.iter().zip(&*self.shape).any(|(named, size)| !named && *size != 1) {
            return Err(refuse(format!("axes {axes:?} do not show all of {}", self.shape)));
        }
        let (memory, byte_offset) = (self.memory.clone(), self.byte_offset);
        Self::strided(memory, self.dtype, shape, strides, byte_offset)
    }

    /// Returns the same row-major elements in another shape.
    ///
    /// # Errors
    ///
    /// When the view is not contiguous, or the shape has another number of elements.
    pub fn reshape(&self, shape: impl Into<Dims>) -> Result<Self, TensorError> {
        let shape = shape.into();
        let elements = |shape: &Dims| shape.checked_volume();
        if !self.is_contiguous() || elements(&shape) != elements(&self.shape) {
            return Err(TensorError::Invalid {
                fqn: None,
                problem: format!("a view of shape {} cannot be seen as {shape}", self.shape),
            });
        }
        Self::contiguous(self.memory.clone(), self.dtype, shape, self.byte_offset)
    }

    /// The length in bytes of the view's contiguous runs in row-major order: all of it when the
    /// view is contiguous, 0 when it is empty.
    #[must_use]
    pub fn run_bytes(&self) -> u64 {
        if self.shape.contains(&0) {
            return 0;
        }
        let mut run = 1_u64;
        for axis in (0..self.shape.ndim()).rev() {
            if self.shape[axis] != 1 && self.strides[axis] != run {
                break;
            }
            run *= self.shape[axis];
        }
        run * self.dtype.size() as u64
    }

    /// Whether the elements are row-major in memory without gaps.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.run_bytes() == self.byte_len()
    }

    /// The byte ranges of the view's elements in row-major order, each
    /// [`run_bytes`](Self::run_bytes) long; none for an empty view.
    pub fn runs(&self) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let run_bytes = self.run_bytes();
        let total = self.byte_len();
        let ndim = if total == 0 { 0 } else { self.shape.ndim() };
        // Axes before those of a run are iterated index by index.
        let mut outer = ndim;
        let mut run = self.dtype.size() as u64;
        while outer > 0 && run < run_bytes {
            outer -= 1;
            run *= self.shape[outer];
        }
        while outer > 0 && self.shape[outer - 1] == 1 {
            outer -= 1;
        }
        let shape: Vec<u64> = self.shape[..outer].to_vec();
        let element = self.dtype.size() as u64;
        let strides: Vec<u64> =
            self.strides[..outer].iter().map(|s| s.wrapping_mul(element)).collect();
        let count = if total == 0 { 0 } else { total / run_bytes };
        let mut index = vec![0_u64; outer];
        let mut at = self.byte_offset as u64;
        (0..count).map(move |_| {
            let start = at;
            for axis in (0..index.len()).rev() {
                index[axis] += 1;
                // The stride of an axis of size 1 is arbitrary; the addition is reverted at once.
                at = at.wrapping_add(strides[axis]);
                if index[axis] < shape[axis] {
                    break;
                }
                at = at.wrapping_sub(strides[axis].wrapping_mul(shape[axis]));
                index[axis] = 0;
            }
            // Both fit: the constructor checked the last element against the memory.
            start as usize..(start + run_bytes) as usize
        })
    }

    /// The row-major elements: borrowed if their runs have at least 4 KiB, copied together
    /// otherwise.
    ///
    /// # Errors
    ///
    /// While the memory is lent for writing.
    pub fn payload(&self) -> Result<Payload, LoanError> {
        const WORTH_A_PIECE: u64 = 4096;
        let bytes = self.memory.read()?;
        if self.byte_len() == 0 {
            return Ok(Payload::default());
        }
        if self.is_contiguous() || self.run_bytes() >= WORTH_A_PIECE {
            return Ok(self.runs().map(|run| bytes.slice(run)).collect());
        }
        let mut gathered = Vec::with_capacity(usize::try_from(self.byte_len()).unwrap_or(0));
        for run in self.runs() {
            gathered.extend_from_slice(&bytes[run]);
        }
        Ok(Payload::from(gathered))
    }

    /// Borrows the whole view for writing, if it is contiguous.
    ///
    /// # Errors
    ///
    /// As [`HostMemory::lend`]. Other views are lent run by run, through [`TensorView::runs`].
    pub fn lend(&self) -> Result<Buffer, LoanError> {
        let len = usize::try_from(self.byte_len()).unwrap_or(usize::MAX);
        self.memory.lend(self.byte_offset..self.byte_offset.saturating_add(len))
    }

    /// Copies row-major elements into the view.
    ///
    /// # Errors
    ///
    /// When `bytes` has another length, or the memory is in use.
    pub fn fill_from(&self, bytes: &[u8]) -> Result<(), LoanError> {
        if bytes.len() as u64 != self.byte_len() {
            return Err(LoanError::OutOfBounds {
                start: 0,
                end: bytes.len(),
                len: usize::try_from(self.byte_len()).unwrap_or(usize::MAX),
            });
        }
        let mut rest = bytes;
        for run in self.runs() {
            let (front, back) = rest.split_at(run.len());
            self.memory.lend(run)?.copy_from_slice(front);
            rest = back;
        }
        Ok(())
    }
}

/// The end of a view's last element in bytes; `None` past `u64`.
fn view_end(dtype: DType, shape: &Dims, strides: &[u64], byte_offset: usize) -> Option<u64> {
    let start = byte_offset as u64;
    if shape.contains(&0) {
        return Some(start);
    }
    let last = shape.iter().zip(strides).try_fold(0_u64, |last, (size, stride)| {
        last.checked_add((size - 1).checked_mul(*stride)?)
    })?;
    last.checked_add(1)?.checked_mul(dtype.size() as u64)?.checked_add(start)
}

/// The region of a whole tensor.
pub(crate) fn full(shape: &Dims) -> Result<Region, TensorError> {
    Ok(Region::full(shape.clone())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::tensor::Tensor;

    fn view(shape: &[u64], strides: &[u64], offset: usize) -> TensorView {
        let memory = HostMemory::from_vec((0..24).collect());
        TensorView::strided(memory, DType::UInt8, shape, strides.to_vec(), offset).unwrap()
    }

    #[test]
    fn a_transposed_view_gathers_by_element() {
        let transposed = view(&[4, 6], &[1, 4], 0);
        assert_eq!((transposed.run_bytes(), transposed.is_contiguous()), (1, false));
        let bytes = transposed.payload().unwrap().to_bytes();
        assert_eq!(&bytes[..7], [0, 4, 8, 12, 16, 20, 1]);
    }

    #[test]
    fn rows_of_a_padded_view_are_runs() {
        let padded = view(&[3, 2], &[8, 1], 1);
        assert_eq!(padded.runs().collect::<Vec<_>>(), [1..3, 9..11, 17..19]);
        padded.fill_from(&[90, 91, 92, 93, 94, 95]).unwrap();
        assert_eq!(padded.payload().unwrap().to_bytes(), [90, 91, 92, 93, 94, 95][..]);
    }

    #[test]
    fn narrowing_keeps_contiguity_where_there_is_some() {
        let whole = view(&[4, 6], &[6, 1], 0);
        let rows = whole.narrow(&Region::new([1, 0], [2, 6]).unwrap()).unwrap();
        assert!(rows.is_contiguous());
        assert!(rows.runs().eq(std::iter::once(6..18)));
        let column = whole.narrow(&Region::new([0, 5], [4, 1]).unwrap()).unwrap();
        assert_eq!(column.payload().unwrap().to_bytes(), [5, 11, 17, 23][..]);
        assert!(whole.narrow(&Region::new([0, 5], [4, 2]).unwrap()).is_err());
    }

    #[test]
    fn axes_are_exchanged_added_and_dropped() {
        let rows = view(&[1, 2, 3], &[6, 3, 1], 0);
        let columns = rows.with_axes(&[Some(2), None, Some(1)]).unwrap();
        assert_eq!(columns.shape(), &Dims::from([3, 1, 2]));
        columns.fill_from(&[0, 1, 10, 11, 20, 21].map(|n: u8| n)).unwrap();
        let all = rows.payload().unwrap();
        assert_eq!(all.to_bytes(), [0, 10, 20, 1, 11, 21][..]);
        for bad in [&[Some(1)][..], &[Some(1), Some(1), Some(2)], &[Some(1), Some(3), Some(2)]] {
            assert!(rows.with_axes(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn other_shapes_share_the_memory() {
        let padded = view(&[3, 2], &[8, 1], 1);
        assert!(padded.reshape([6]).is_err(), "there are gaps");
        let tensor = Tensor::from_view(padded).unwrap();
        assert_eq!(tensor.to_vec().unwrap(), [1, 2, 9, 10, 17, 18]);
        let whole = view(&[2, 3], &[3, 1], 4);
        assert!(whole.reshape([5]).is_err());
        let flat = whole.reshape([6]).unwrap().payload().unwrap().to_bytes();
        assert_eq!(flat[..], [4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn degenerate_views() {
        assert_eq!(view(&[], &[], 23).payload().unwrap().to_bytes(), [23][..]);
        assert!(view(&[0, 5], &[5, 1], 0).payload().unwrap().is_empty());
        let huge = view(&[1 << 40, 1 << 40, 0], &[1, 1, 1], 0);
        assert_eq!((huge.run_bytes(), huge.byte_len(), huge.runs().count()), (0, 0, 0));
        assert!(huge.is_contiguous());
        assert!(view(&[2, 1, 2], &[4, u64::MAX, 2], 0).runs().eq([0..1, 2..3, 4..5, 6..7]));
        assert!(view(&[1, 3, 1], &[99, 1, 7], 2).runs().eq(std::iter::once(2..5)));
        let memory = HostMemory::zeroed(4);
        assert!(TensorView::strided(memory, DType::Int32, [2], vec![1], 0).is_err());
    }

    #[test]
    fn contiguous_memory_is_borrowed_not_copied() {
        let tensor = Tensor::zeros(DType::Float32, [16]).unwrap();
        let memory = tensor.shards()[0].view().unwrap().memory();
        let payload = tensor.shards()[0].view().unwrap().payload().unwrap();
        assert_eq!(payload.pieces()[0].as_ptr(), memory.read().unwrap().as_ptr());
    }
}
