//! A part of a larger memory as memory of its own.

use std::ptr::NonNull;

use super::{Buffer, HostMemory};

/// Lends the bytes of an exclusive loan on, in pieces; the loan ends when the memory and all of its
/// loans are gone. So a part of a larger allocation, such as a pinned one, is memory of its own.
///
/// ```
/// use dcp_core::HostMemory;
///
/// let arena = HostMemory::zeroed(8);
/// let part = HostMemory::from(arena.lend(2..6)?);
/// part.lend(0..4)?.copy_from_slice(&[1, 2, 3, 4]);
/// assert!(arena.read().is_err(), "a part of it is in use");
/// drop(part);
/// assert_eq!(arena.read()?, [0, 0, 1, 2, 3, 4, 0, 0][..]);
/// # Ok::<(), dcp_core::memory::LoanError>(())
/// ```
impl From<Buffer> for HostMemory {
    fn from(mut buffer: Buffer) -> Self {
        let (ptr, len) = (NonNull::from(&mut *buffer).cast::<u8>(), buffer.len());
        // SAFETY: until it is dropped, the buffer has exclusive access to its range (invariant 2),
        // which is valid and initialized as long as the buffer's allocation (invariant 1); moving
        // the buffer into the owner moves no byte, and nobody reaches the bytes through it there.
        unsafe { Self::from_raw_parts(ptr, len, buffer) }
    }
}
