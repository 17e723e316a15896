//! Gathers elements of any layout into row-major order.

use dcp_core::{DType, Dims, FormatError};

use super::blob::ByteOrder;
use super::layout::{TensorLayout, bad};

impl TensorLayout {
    /// The elements in row-major, little-endian order, from all bytes of the storage: applies
    /// strides and offset, conjugation and negation, and the byte order.
    ///
    /// `limit` bounds the result in bytes. A tensor with a stride of 0 may be much larger than its
    /// storage.
    ///
    /// # Errors
    ///
    /// When the storage has the wrong length, the result exceeds `limit` or the available memory,
    /// or the dtype cannot be negated.
    pub fn gather(
        &self,
        storage: &[u8],
        byte_order: ByteOrder,
        limit: u64,
    ) -> Result<Vec<u8>, FormatError> {
        self.check_storage(storage)?;
        let too_large = || bad(format!("its {} bytes are more than {limit}", self.byte_len()));
        let byte_len = Some(self.byte_len()).filter(|len| *len <= limit).ok_or_else(too_large)?;
        let byte_len = usize::try_from(byte_len).map_err(|_| too_large())?;
        let mut out = Vec::new();
        out.try_reserve_exact(byte_len).map_err(|error| too_large().with_source(error))?;
        out.resize(byte_len, 0);
        self.gather_part(storage, byte_order, 0, &mut out)?;
        Ok(out)
    }

    /// Fills `out` with the result of [`gather`](Self::gather) from byte `start`, without further
    /// memory. Both ends must be at element boundaries.
    pub(crate) fn gather_part(
        &self,
        storage: &[u8],
        byte_order: ByteOrder,
        start: u64,
        out: &mut [u8],
    ) -> Result<(), FormatError> {
        self.check_storage(storage)?;
        if out.is_empty() {
            return Ok(());
        }
        match self.row_major_range() {
            Some(range) => range.start.checked_add(start).and_then(|from| {
                let from = usize::try_from(from).ok()?;
                out.copy_from_slice(storage.get(from..)?.get(..out.len())?);
                Some(())
            }),
            None => match self.dtype.size() {
                1 => self.collect::<1>(storage, start, out),
                2 => self.collect::<2>(storage, start, out),
                4 => self.collect::<4>(storage, start, out),
                8 => self.collect::<8>(storage, start, out),
                _ => self.collect::<16>(storage, start, out),
            },
        }
        .ok_or_else(|| bad("an element is outside the storage"))?;
        self.evaluate(byte_order, out)
    }

    /// Converts stored elements to the tensor's: little-endian, conjugated, negated.
    pub(crate) fn evaluate(
        &self,
        byte_order: ByteOrder,
        out: &mut [u8],
    ) -> Result<(), FormatError> {
        // PyTorch 2.15 swaps storages by their class, so those of `_rebuild_tensor_v3`, which count
        // bytes, stay unswapped. The dtype shows the writer's intent.
        let scalar = self.dtype.scalar_size();
        if byte_order == ByteOrder::Big && scalar > 1 {
            out.chunks_exact_mut(scalar).for_each(<[u8]>::reverse);
        }
        if self.conj && self.dtype.is_complex() {
            for imaginary in out.chunks_exact_mut(scalar).skip(1).step_by(2) {
                flip_sign(imaginary);
            }
        }
        if self.neg {
            negate(self.dtype, out)?;
        }
        Ok(())
    }

    fn check_storage(&self, storage: &[u8]) -> Result<(), FormatError> {
        if storage.len() as u64 == self.storage.byte_len {
            return Ok(());
        }
        let (found, expected) = (storage.len(), self.storage.byte_len);
        Err(bad(format!("its storage has {found} bytes instead of {expected}")))
    }

    /// Visits the elements in row-major order from the one at byte `start`; `N` is the size of one.
    fn collect<const N: usize>(&self, storage: &[u8], start: u64, out: &mut [u8]) -> Option<()> {
        let elements = storage.as_chunks::<N>().0;
        let out = out.as_chunks_mut::<N>().0;
        let row_len = self.sizes.last().copied().unwrap_or(1);
        let row_stride = self.strides.last().copied().unwrap_or(1);
        let outer = self.sizes.len().saturating_sub(1);
        let (outer_sizes, outer_strides) = (self.sizes.get(..outer)?, self.strides.get(..outer)?);

        let first = start / N as u64;
        let mut column = first.checked_rem(row_len)?;
        let mut row = first / row_len;
        let mut index = Dims::zeros(outer);
        let mut row_start = self.storage_offset;
        for ((at, size), stride) in index.iter_mut().zip(outer_sizes).zip(outer_strides).rev() {
            *at = row.checked_rem(*size)?;
            row /= size;
            row_start = row_start.checked_add(at.checked_mul(*stride)?)?;
        }

        let mut filled = 0;
        while filled < out.len() {
            let len = usize::try_from(row_len - column).unwrap_or(usize::MAX);
            let len = len.min(out.len() - filled);
            let part = out.get_mut(filled..filled + len)?;
            let from = row_start.checked_add(column.checked_mul(row_stride)?)?;
            let from = usize::try_from(from).ok()?;
            if row_stride == 1 {
                part.copy_from_slice(elements.get(from..)?.get(..len)?);
            } else {
                let row_stride = usize::try_from(row_stride).ok()?;
                for (at, element) in part.iter_mut().enumerate() {
                    *element = *elements.get(from + at * row_stride)?;
                }
            }
            filled += len;
            column = 0;
            for ((at, size), stride) in index.iter_mut().zip(outer_sizes).zip(outer_strides).rev() {
                *at += 1;
                if *at < *size {
                    row_start += stride;
                    break;
                }
                *at = 0;
                row_start -= stride * (size - 1);
            }
        }
        Some(())
    }
}

/// Flips the sign of a little-endian IEEE number.
fn flip_sign(scalar: &mut [u8]) {
    if let Some(top) = scalar.last_mut() {
        *top ^= 0x80;
    }
}

fn negate(dtype: DType, elements: &mut [u8]) -> Result<(), FormatError> {
    let scalars = elements.chunks_exact_mut(dtype.scalar_size());
    match dtype {
        DType::Float64
        | DType::Float32
        | DType::Float16
        | DType::BFloat16
        | DType::Complex128
        | DType::Complex64
        | DType::Complex32
        | DType::BComplex32 => scalars.for_each(flip_sign),
        DType::Int64 | DType::Int32 | DType::Int16 | DType::Int8 => {
            for scalar in scalars {
                let mut carry = true;
                for byte in scalar {
                    (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
                }
            }
        }
        _ => return Err(bad(format!("{dtype} has no negatives, but the tensor is one"))),
    }
    Ok(())
}
