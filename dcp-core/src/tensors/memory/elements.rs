//! Bytes as elements, and elements as bytes.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use bytes::Bytes;

use super::element::{TensorElement, from_bytes};

/// Elements of a tensor as a slice.
///
/// They are those in the tensor's memory where they are contiguous and aligned there, and a copy
/// otherwise. Memory that is not copied is lent until this value is dropped, so a load into it
/// fails meanwhile.
pub struct Elements<T>(Kept<T>);

enum Kept<T> {
    /// Aligned, and of whole elements.
    Lent(Bytes, PhantomData<T>),
    Copied(Vec<T>),
}

impl<T: TensorElement> Elements<T> {
    /// The elements whose bytes these are, without a copy where that is possible.
    pub(crate) fn of(bytes: Bytes) -> Self {
        let aligned = bytes.as_ptr().cast::<T>().is_aligned();
        let fits = T::IS_NUMBER && aligned && bytes.len().is_multiple_of(size_of::<T>());
        // Stored elements are little-endian.
        Self(if fits && cfg!(target_endian = "little") {
            Kept::Lent(bytes, PhantomData)
        } else {
            Kept::Copied(from_bytes(&bytes))
        })
    }

    /// Whether the elements are those in the tensor's memory, not a copy.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        matches!(self.0, Kept::Lent(..))
    }
}

impl<T: TensorElement> Deref for Elements<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Kept::Copied(elements) => elements,
            // SAFETY: `of` checked alignment and length, any bytes are valid numbers (invariant 5),
            // and `Bytes` are valid and unchanged as long as they live.
            Kept::Lent(bytes, _) => unsafe {
                std::slice::from_raw_parts(bytes.as_ptr().cast::<T>(), bytes.len() / size_of::<T>())
            },
        }
    }
}

impl<T: TensorElement> AsRef<[T]> for Elements<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: TensorElement + fmt::Debug> fmt::Debug for Elements<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The bytes of elements as they are in memory.
fn in_memory<T: TensorElement>(elements: &[T]) -> &[u8] {
    // SAFETY: elements are bytes without padding (invariant 5), borrowed as long as the result.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The bytes of another library's elements, without a copy on little-endian machines.
pub(super) fn bytes_of_owner<T: TensorElement>(
    owner: impl Deref<Target: AsRef<[T]>> + Send + Sync + 'static,
) -> Bytes {
    if cfg!(target_endian = "little") {
        Bytes::from_owner(Owner(owner, PhantomData))
    } else {
        super::element::to_bytes((*owner).as_ref()).into()
    }
}

struct Owner<O, T>(O, PhantomData<T>);

impl<O: Deref<Target: AsRef<[T]>>, T: TensorElement> AsRef<[u8]> for Owner<O, T> {
    fn as_ref(&self) -> &[u8] {
        in_memory((*self.0).as_ref())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::tensors::memory::{HostMemory, LoanError};

    #[test]
    fn vectors_and_buffers_of_numbers_are_not_copied() {
        let numbers = vec![1.5_f32, -2.0];
        let address = numbers.as_ptr().cast::<u8>();
        let memory = HostMemory::from_elements(numbers);
        assert_eq!(memory.read().unwrap().as_ptr(), address);
        memory.lend(4..8).unwrap().copy_from_slice(&3.0_f32.to_le_bytes());
        let elements = Elements::<f32>::of(memory.read().unwrap());
        assert_eq!((&*elements, elements.is_lent()), (&[1.5, 3.0][..], true));
        assert!(memory.lend(0..1).is_err(), "a slice of it is out");
        drop(elements);
        assert!(memory.lend(0..1).is_ok());

        let shared: Arc<[u16]> = Arc::new([1, 2, 3]);
        let memory = HostMemory::from_owner(Arc::clone(&shared));
        assert_eq!(memory.read().unwrap(), [1, 0, 2, 0, 3, 0][..]);
        assert_eq!(memory.read().unwrap().as_ptr(), shared.as_ptr().cast::<u8>());
        assert_eq!(memory.lend(0..1).unwrap_err(), LoanError::ReadOnly);
        drop(memory);
        assert_eq!(Arc::strong_count(&shared), 1);
        assert_eq!(HostMemory::from_owner(Arc::new(vec![true, false])).to_vec().unwrap(), [1, 0]);
    }

    #[test]
    fn bytes_that_are_not_aligned_are_copied() {
        let bytes = Bytes::from([0, 1_u32, 2].map(u32::to_le_bytes).concat());
        let start = usize::from(bytes.as_ptr().cast::<u32>().is_aligned());
        let elements = Elements::<u32>::of(bytes.slice(start..start + 8));
        assert!(!elements.is_lent());
        assert_eq!(elements.len(), 2);
        let truth = Elements::<bool>::of(Bytes::from_static(&[0, 1, 2]));
        assert_eq!((&*truth, truth.is_lent()), (&[false, true, true][..], false));
    }
}
