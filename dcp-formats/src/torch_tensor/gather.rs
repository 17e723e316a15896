//! Elements of any layout into row-major order.

use dcp_core::{DType, FormatError};

use super::blob::ByteOrder;
use super::layout::{TensorLayout, bad};

impl TensorLayout {
    /// The elements in row-major order and little-endian, from all bytes of the storage: strides
    /// and offset followed, conjugates and negatives taken, bytes swapped where they are
    /// big-endian.
    ///
    /// `limit` bounds the result in bytes; a tensor with a stride of 0 may be much larger than its
    /// storage.
    ///
    /// # Errors
    ///
    /// When the storage has not the length it should have, the result would exceed `limit`, or
    /// negatives are asked of a type that has none.
    pub fn gather(
        &self,
        storage: &[u8],
        byte_order: ByteOrder,
        limit: u64,
    ) -> Result<Vec<u8>, FormatError> {
        if storage.len() as u64 != self.storage.byte_len {
            let (found, expected) = (storage.len(), self.storage.byte_len);
            return Err(bad(format!("its storage has {found} bytes instead of {expected}")));
        }
        let too_large = || bad(format!("its {} bytes are more than {limit}", self.byte_len()));
        let byte_len = Some(self.byte_len()).filter(|len| *len <= limit).ok_or_else(too_large)?;
        let byte_len = usize::try_from(byte_len).map_err(|_| too_large())?;
        let mut out = match self.row_major_range() {
            Some(range) => {
                let start = usize::try_from(range.start).map_err(|_| too_large())?;
                storage.get(start..).and_then(|rest| rest.get(..byte_len)).map(<[u8]>::to_vec)
            }
            None => match self.dtype.size() {
                1 => self.collect::<1>(storage, byte_len),
                2 => self.collect::<2>(storage, byte_len),
                4 => self.collect::<4>(storage, byte_len),
                8 => self.collect::<8>(storage, byte_len),
                _ => self.collect::<16>(storage, byte_len),
            },
        }
        .ok_or_else(|| bad("an element lies outside the storage"))?;

        // PyTorch 2.15 swaps storages by their class and so leaves those of `_rebuild_tensor_v3`,
        // which count in bytes, as they are; the element type says what the writer meant.
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
            negate(self.dtype, &mut out)?;
        }
        Ok(out)
    }

    /// Walks the elements in row-major order; `N` is the size of one.
    fn collect<const N: usize>(&self, storage: &[u8], byte_len: usize) -> Option<Vec<u8>> {
        let elements = storage.as_chunks::<N>().0;
        let mut out = Vec::with_capacity(byte_len);
        let (outer_sizes, row_len) = match self.sizes.split_last() {
            Some((last, outer)) => (outer, usize::try_from(*last).ok()?),
            None => (&[][..], 1),
        };
        let row_stride = self.strides.last().copied().unwrap_or(1);
        let row_stride = usize::try_from(row_stride).ok()?;
        let mut index = vec![0_u64; outer_sizes.len()];
        let mut start = usize::try_from(self.storage_offset).ok()?;
        while out.len() < byte_len {
            if row_stride == 1 {
                let row = elements.get(start..)?.get(..row_len)?;
                out.extend_from_slice(row.as_flattened());
            } else {
                for at in 0..row_len {
                    out.extend_from_slice(elements.get(start + at * row_stride)?);
                }
            }
            for axis in (0..index.len()).rev() {
                let (size, stride) = (*outer_sizes.get(axis)?, *self.strides.get(axis)?);
                let at = index.get_mut(axis)?;
                *at += 1;
                if *at < size {
                    start += usize::try_from(stride).ok()?;
                    break;
                }
                *at = 0;
                start -= usize::try_from(stride * (size - 1)).ok()?;
            }
        }
        Some(out)
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
