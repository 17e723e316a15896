//! Bytes as elements, and elements as bytes.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use bytes::Bytes;

use super::element::{Element, from_bytes};

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

impl<T: Element> Elements<T> {
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

impl<T: Element> Deref for Elements<T> {
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

impl<T: Element> AsRef<[T]> for Elements<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element + fmt::Debug> fmt::Debug for Elements<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The bytes of elements as they are in memory.
fn in_memory<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: elements are bytes without padding (invariant 5), borrowed as long as the result.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The bytes of another library's elements, without a copy on little-endian machines.
pub(super) fn bytes_of_owner<T: Element>(owner: impl AsRef<[T]> + Send + Sync + 'static) -> Bytes {
    if cfg!(target_endian = "little") {
        Bytes::from_owner(Owner(owner, PhantomData))
    } else {
        super::element::to_bytes(owner.as_ref()).into()
    }
}

struct Owner<O, T>(O, PhantomData<T>);

impl<O: AsRef<[T]>, T: Element> AsRef<[u8]> for Owner<O, T> {
    fn as_ref(&self) -> &[u8] {
        in_memory(self.0.as_ref())
    }
}
