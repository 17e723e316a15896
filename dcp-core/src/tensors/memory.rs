//! Host memory that is lent in pieces: the only module of this crate with `unsafe`.
//!
//! A [`HostMemory`] owns a tensor's bytes. A writer borrows them shared, as [`Bytes`]; a reader
//! borrows disjoint ranges exclusively, as [`Buffer`]s, which it owns during the I/O and may move
//! to another thread or into the kernel. A loan ends when its piece is dropped, on any thread, so a
//! dropped future never leaves a writer in freed or visible memory.
//!
//! # Safety
//!
//! The invariants that the `unsafe` blocks rely on:
//!
//! 1. `Allocation::ptr` is valid for reads and (unless `read_only`) writes of `len` bytes for as
//!    long as the allocation lives. The owner inside the allocation keeps it so, and the caller of
//!    the one unsafe constructor promises it. It is freed only when the last `Arc` goes, and every
//!    loan holds one.
//! 2. The bytes are reached through loans only. `Book` records every outstanding loan under a
//!    mutex; it grants an exclusive range only when no shared loan is out and no exclusive range
//!    overlaps, and a shared loan only when no exclusive one is out. The parts of a divided
//!    [`Buffer`] are disjoint and keep its entry in the book, and nothing dereferences the whole.
//! 3. A loan is returned exactly once, by `Drop`; that of a divided buffer when its last part is
//!    gone.
//! 4. Memory that a [`scope`] borrows is valid until the scope ends. Its end revokes the allocation
//!    and waits until no loan is out; a revoked allocation grants none.
//! 5. Elements of every [`TensorElement`] type are bytes without padding, and every byte pattern is an
//!    element of every [`NumericElement`] type.

#![allow(unsafe_code, reason = "the leaf module that proves its loans sound, see above")]

mod buffer;
pub(crate) mod element;
mod elements;
mod owned_box;
mod part;
mod scope;
mod streaming;
#[cfg(test)]
mod tests;

use std::alloc::{Layout, alloc_zeroed};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, Range};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use bytes::Bytes;

pub use self::buffer::Buffer;
pub use self::element::{NumericElement, TensorElement};
pub use self::elements::Elements;
use self::owned_box::OwnedBox;
pub use self::scope::{Scope, scope};
pub use self::streaming::copy_streaming;

/// Bytes in host memory, owned or foreign, that are lent for reading or, by ranges, for writing.
/// Clones share the memory.
///
/// ```
/// use dcp_core::HostMemory;
///
/// let memory = HostMemory::zeroed(8);
/// let mut tail = memory.lend(4..8)?;
/// tail.copy_from_slice(&[1, 2, 3, 4]);
/// assert!(memory.read().is_err(), "a writer is still at work");
/// drop(tail);
/// assert_eq!(memory.read()?, [0, 0, 0, 0, 1, 2, 3, 4][..]);
/// # Ok::<(), dcp_core::memory::LoanError>(())
/// ```
#[derive(Clone)]
pub struct HostMemory(Arc<Allocation>);

struct Allocation {
    ptr: NonNull<u8>,
    len: usize,
    read_only: bool,
    /// By a scope, which revokes it.
    borrowed: bool,
    book: Mutex<Book>,
    /// Notified when a loan of revoked memory ends.
    returned: Condvar,
    /// Keeps `ptr` valid; never accessed.
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: the pointer is only followed through loans, which exclude each other (invariant 2), and
// the owner is itself `Send + Sync`.
unsafe impl Send for Allocation {}
// SAFETY: as above; the book is behind a mutex.
unsafe impl Sync for Allocation {}

#[derive(Default)]
struct Book {
    shared: usize,
    /// Lent exclusive ranges, start to end; disjoint.
    exclusive: BTreeMap<usize, usize>,
    /// The scope that borrowed the memory has ended.
    revoked: bool,
}

/// The reason why memory cannot be lent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoanError {
    /// The range exceeds the memory.
    #[error("bytes {start}..{end} are outside a memory of {len} bytes")]
    OutOfBounds {
        /// The first requested byte.
        start: usize,
        /// The end of the requested range.
        end: usize,
        /// The length of the memory in bytes.
        len: usize,
    },
    /// Another loan includes some of the bytes.
    #[error("bytes {start}..{end} are in use by another read or write")]
    InUse {
        /// The first requested byte.
        start: usize,
        /// The end of the requested range.
        end: usize,
    },
    /// The memory wraps immutable bytes.
    #[error("the memory is read-only")]
    ReadOnly,
    /// The [`scope`] that borrowed the memory has ended.
    #[error("the memory was borrowed in a scope that has ended")]
    Revoked,
}

impl HostMemory {
    /// Allocates `len` zero bytes. Aborts the process when memory is exhausted;
    /// [`try_zeroed`](Self::try_zeroed) does not.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        Self::from_vec(vec![0; len])
    }

    /// Allocates `len` zero bytes; `None` when memory is exhausted.
    #[must_use]
    pub fn try_zeroed(len: usize) -> Option<Self> {
        let layout = Layout::array::<u8>(len).ok()?;
        if len == 0 {
            return Some(Self::from_vec(Vec::new()));
        }
        // SAFETY: the layout has at least one byte.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        // SAFETY: the global allocator gave this pointer for the layout of `len` bytes, by which a
        // vector of that capacity frees it; all of the bytes are initialized.
        Some(Self::from_vec(unsafe { Vec::from_raw_parts(ptr.as_ptr(), len, len) }))
    }

    /// Takes ownership of a vector.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::from_elements(bytes)
    }

    /// Takes ownership of a vector of numbers, without a copy.
    #[must_use]
    pub fn from_elements<T: NumericElement>(elements: Vec<T>) -> Self {
        let len = size_of_val(&*elements);
        let raw = Box::into_raw(elements.into_boxed_slice());
        // SAFETY: the box was just turned into this pointer; `OwnedBox` frees it once, on drop.
        let owner = unsafe { OwnedBox::new(raw) };
        let ptr = NonNull::new(raw.cast::<u8>()).unwrap_or(NonNull::dangling());
        // SAFETY: `ptr` points to the `len` bytes that `owner` frees on drop, nothing else refers
        // to them, and any bytes are valid numbers (invariant 5).
        unsafe { Self::from_raw_parts(ptr, len, owner) }
    }

    /// Wraps the immutable elements behind a pointer of another library, such as an `Arc<[u8]>`, an
    /// `Arc<Vec<f32>>` or an `Arc` of any type with `AsRef<[f32]>`, without a copy. They can be
    /// read but not lent for writing.
    ///
    /// `owner` is dropped when the memory and every loan of it are gone.
    #[must_use]
    pub fn from_owner<T: TensorElement>(
        owner: impl Deref<Target: AsRef<[T]>> + Send + Sync + 'static,
    ) -> Self {
        Self::from_bytes(elements::bytes_of_owner(owner))
    }

    /// Wraps immutable bytes, which can be read but not lent for writing.
    #[must_use]
    pub fn from_bytes(bytes: Bytes) -> Self {
        let ptr = NonNull::new(bytes.as_ptr().cast_mut()).unwrap_or(NonNull::dangling());
        let len = bytes.len();
        Self::new(ptr, len, true, Box::new(bytes))
    }

    /// Wraps foreign memory: a mapping, a pinned buffer, an array of another framework.
    ///
    /// `owner` is dropped when the memory and every loan of it are gone.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped, `ptr` must be valid for reads and writes of `len` bytes, all of
    /// them initialized, and nothing else may access them while a loan is out.
    #[must_use]
    pub unsafe fn from_raw_parts(
        ptr: NonNull<u8>,
        len: usize,
        owner: impl Any + Send + Sync,
    ) -> Self {
        Self::new(ptr, len, false, Box::new(owner))
    }

    fn new(
        ptr: NonNull<u8>,
        len: usize,
        read_only: bool,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        let (borrowed, book, returned) = Default::default();
        Self(Arc::new(Allocation { ptr, len, read_only, borrowed, book, returned, _owner: owner }))
    }

    /// Memory that a scope keeps valid until it revokes it.
    fn borrowed(ptr: NonNull<u8>, len: usize, read_only: bool) -> Self {
        let (book, returned) = Default::default();
        let (borrowed, owner) = (true, Box::new(()));
        Self(Arc::new(Allocation { ptr, len, read_only, borrowed, book, returned, _owner: owner }))
    }

    /// Whether both are the same memory; equal bytes do not suffice.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Whether the memory is read-only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.0.read_only
    }

    /// Whether a [`scope`] borrowed the memory, at whose end it is revoked.
    #[must_use]
    pub fn is_borrowed(&self) -> bool {
        self.0.borrowed
    }

    /// Borrows all bytes for reading, without a copy, until the result and all slices of it are
    /// dropped.
    ///
    /// # Errors
    ///
    /// [`LoanError::InUse`] while a range is lent for writing, [`LoanError::Revoked`] after the end
    /// of the memory's [`scope`].
    pub fn read(&self) -> Result<Bytes, LoanError> {
        if self.0.len == 0 {
            return Ok(Bytes::new());
        }
        let mut book = self.0.book();
        if book.revoked {
            return Err(LoanError::Revoked);
        }
        if let Some((&start, &end)) = book.exclusive.first_key_value() {
            return Err(LoanError::InUse { start, end });
        }
        book.shared += 1;
        drop(book);
        Ok(Bytes::from_owner(SharedLoan(Arc::clone(&self.0))))
    }

    /// Borrows `range` for writing until the buffer is dropped.
    ///
    /// # Errors
    ///
    /// When the range exceeds the memory, the memory is read-only or its [`scope`] has ended, or a
    /// loan of any of the bytes exists.
    pub fn lend(&self, range: Range<usize>) -> Result<Buffer, LoanError> {
        let Range { start, end } = range;
        if start > end || end > self.0.len {
            return Err(LoanError::OutOfBounds { start, end, len: self.0.len });
        }
        if self.0.read_only {
            return Err(LoanError::ReadOnly);
        }
        if start < end {
            let mut book = self.0.book();
            if book.revoked {
                return Err(LoanError::Revoked);
            }
            let before = book.exclusive.range(..end).next_back();
            if book.shared > 0 || before.is_some_and(|(_, &other_end)| other_end > start) {
                return Err(LoanError::InUse { start, end });
            }
            book.exclusive.insert(start, end);
        }
        Ok(Buffer::lent(Arc::clone(&self.0), start, end))
    }

    /// Copies all bytes.
    ///
    /// # Errors
    ///
    /// As [`HostMemory::read`].
    pub fn to_vec(&self) -> Result<Vec<u8>, LoanError> {
        Ok(self.read()?.to_vec())
    }
}

impl Allocation {
    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a loan, by `how`.
    fn give_back(&self, how: impl FnOnce(&mut Book)) {
        let mut book = self.book();
        how(&mut book);
        if book.revoked {
            self.returned.notify_all();
        }
    }

    /// Grants no more loans, and waits until the last one has ended.
    fn revoke(&self) {
        let mut book = self.book();
        book.revoked = true;
        while book.shared > 0 || !book.exclusive.is_empty() {
            book = self.returned.wait(book).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl From<Vec<u8>> for HostMemory {
    fn from(bytes: Vec<u8>) -> Self {
        Self::from_vec(bytes)
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("len", &self.0.len).finish_non_exhaustive()
    }
}

/// The owner behind the `Bytes` of a shared loan.
struct SharedLoan(Arc<Allocation>);

impl AsRef<[u8]> for SharedLoan {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: valid by invariant 1; no exclusive loan is out while this one is, by
        // invariant 2.
        unsafe { std::slice::from_raw_parts(self.0.ptr.as_ptr(), self.0.len) }
    }
}

impl Drop for SharedLoan {
    fn drop(&mut self) {
        self.0.give_back(|book| book.shared -= 1);
    }
}
