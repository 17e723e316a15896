//! Exclusive loans of host memory.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use bytes::Bytes;

use super::{Allocation, HostMemory};

/// Exclusive, owned access to a range of bytes, which a storage fills on a read.
///
/// Dereferences to a slice, can be moved anywhere, and returns its range on drop.
pub struct Buffer {
    hold: Hold,
    start: usize,
    end: usize,
}

/// The entry of the book that excludes other loans of a buffer's range.
enum Hold {
    /// An entry of the book, from the buffer's start to its end.
    Entry(Arc<Allocation>),
    /// The entry of a buffer that is divided into disjoint parts, of which this is one.
    Part(Arc<Buffer>),
}

impl Buffer {
    /// Allocates a buffer of `len` zero bytes. Aborts the process when memory is exhausted;
    /// [`try_zeroed`](Self::try_zeroed) does not.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        Self::from_vec(vec![0; len])
    }

    /// Allocates a buffer of `len` zero bytes; `None` when memory is exhausted.
    #[must_use]
    pub fn try_zeroed(len: usize) -> Option<Self> {
        HostMemory::try_zeroed(len).map(Self::all_of)
    }

    /// A buffer that owns a vector.
    #[must_use]
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::all_of(HostMemory::from_vec(bytes))
    }

    /// The whole of a memory without other owners.
    fn all_of(HostMemory(memory): HostMemory) -> Self {
        let end = memory.len;
        if end > 0 {
            memory.book().exclusive.insert(0, end);
        }
        Self { hold: Hold::Entry(memory), start: 0, end }
    }

    /// The loan of a range that the book has an entry for.
    pub(super) fn lent(memory: Arc<Allocation>, start: usize, end: usize) -> Self {
        Self { hold: Hold::Entry(memory), start, end }
    }

    fn allocation(&self) -> &Allocation {
        match &self.hold {
            Hold::Entry(memory) => memory,
            Hold::Part(whole) => whole.allocation(),
        }
    }

    /// Divides the buffer into consecutive parts of these lengths, in bytes, at less cost than
    /// [`split_to`](Self::split_to) for each. Bytes after the last part are in none.
    ///
    /// The range is returned to its memory when the last part is dropped.
    ///
    /// # Panics
    ///
    /// When the lengths exceed that of the buffer.
    #[must_use = "without its parts, the buffer is dropped"]
    pub fn divide(self, lens: impl IntoIterator<Item = usize>) -> Vec<Buffer> {
        let (mut start, end) = (self.start, self.end);
        let whole = Arc::new(self);
        let part = |len: usize| {
            assert!(len <= end - start, "a part of {len} bytes of the last {}", end - start);
            let part = Buffer { hold: Hold::Part(Arc::clone(&whole)), start, end: start + len };
            start += len;
            part
        };
        lens.into_iter().map(part).collect()
    }

    /// Splits the buffer: keeps the bytes from `at` and returns those before.
    ///
    /// # Panics
    ///
    /// When `at` exceeds the length.
    #[must_use = "the front part is returned"]
    pub fn split_to(&mut self, at: usize) -> Buffer {
        assert!(at <= self.len(), "split at {at} of a buffer of {} bytes", self.len());
        let middle = self.start + at;
        let hold = match &self.hold {
            Hold::Part(whole) => Hold::Part(Arc::clone(whole)),
            Hold::Entry(memory) => {
                let mut book = memory.book();
                if self.start < self.end {
                    book.exclusive.remove(&self.start);
                }
                if self.start < middle {
                    book.exclusive.insert(self.start, middle);
                }
                if middle < self.end {
                    book.exclusive.insert(middle, self.end);
                }
                drop(book);
                Hold::Entry(Arc::clone(memory))
            }
        };
        let front = Buffer { hold, start: self.start, end: middle };
        self.start = middle;
        front
    }

    /// Ends writing: the same bytes as immutable [`Bytes`], without a copy.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        if self.start == self.end { Bytes::new() } else { Bytes::from_owner(self) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // No loan of an empty range is recorded, so its allocation may be gone.
        if self.start == self.end {
            return &[];
        }
        // SAFETY: the range is within the allocation, is valid by invariant 1, and no other
        // loan of it is out by invariant 2.
        unsafe {
            std::slice::from_raw_parts(
                self.allocation().ptr.as_ptr().add(self.start),
                self.end - self.start,
            )
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        if self.start == self.end {
            return &mut [];
        }
        // SAFETY: as in `deref`, and `&mut self` excludes other references through this buffer.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.allocation().ptr.as_ptr().add(self.start),
                self.end - self.start,
            )
        }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Hold::Entry(memory) = &self.hold
            && self.start < self.end
        {
            memory.give_back(|book| {
                book.exclusive.remove(&self.start);
            });
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len()).finish_non_exhaustive()
    }
}
