//! Memory of segments, used again: new memory costs a page fault for every 4 KiB.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use dcp_core::HostMemory;
use dcp_core::memory::LoanError;

/// Pieces of memory of one length, as many as segments were in use at once.
#[derive(Debug)]
pub(crate) struct SegmentMemory {
    byte_len: usize,
    unused: Mutex<Vec<HostMemory>>,
}

/// The memory of one segment.
#[derive(Debug)]
pub(crate) struct Lease {
    memory: HostMemory,
    byte_len: usize,
    /// The pool that it returns to.
    home: Weak<SegmentMemory>,
}

impl SegmentMemory {
    /// Memory for segments of at most `byte_len` bytes.
    pub(crate) fn new(byte_len: u64) -> Arc<Self> {
        let byte_len = usize::try_from(byte_len).unwrap_or(usize::MAX);
        Arc::new(Self { byte_len, unused: Mutex::default() })
    }

    /// Memory for a segment of `byte_len` bytes, which may hold the bytes of an earlier one; `None`
    /// when memory is exhausted. Short segments get new memory: thousands of them are in use at once.
    pub(crate) fn take(self: &Arc<Self>, byte_len: u64) -> Option<Lease> {
        let byte_len = usize::try_from(byte_len).ok()?;
        if byte_len > self.byte_len || byte_len < self.byte_len / 2 {
            let memory = HostMemory::try_zeroed(byte_len)?;
            return Some(Lease { memory, byte_len, home: Weak::new() });
        }
        // A read that was dropped may still write to its memory.
        let is_free = |memory: &HostMemory| memory.lend(0..memory.len()).is_ok();
        let found = {
            let mut unused = self.unused();
            let position = unused.iter().rposition(is_free);
            position.map(|position| unused.swap_remove(position))
        };
        let memory = match found {
            Some(memory) => memory,
            None => HostMemory::try_zeroed(self.byte_len)?,
        };
        Some(Lease { memory, byte_len, home: Arc::downgrade(self) })
    }

    fn unused(&self) -> MutexGuard<'_, Vec<HostMemory>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// The memory, whose first bytes are the segment's.
    pub(crate) fn memory(&self) -> &HostMemory {
        &self.memory
    }

    /// The segment. Its memory returns when the last of its bytes is dropped.
    pub(crate) fn freeze(self) -> Result<Bytes, LoanError> {
        let bytes = self.memory.read()?.slice(..self.byte_len);
        Ok(match self.home.strong_count() {
            0 => bytes,
            _ => Bytes::from_owner(Segment { bytes, _lease: self }),
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade() {
            home.unused().push(self.memory.clone());
        }
    }
}

/// The bytes of a segment, and their memory, which returns after them.
struct Segment {
    bytes: Bytes,
    _lease: Lease,
}

impl AsRef<[u8]> for Segment {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_after_the_last_bytes_of_a_segment() {
        let segments = SegmentMemory::new(1000);
        let first = segments.take(900).unwrap();
        first.memory().lend(0..900).unwrap().fill(7);
        let bytes = first.freeze().unwrap();
        let rest = bytes.slice(10..20);
        let place = bytes.as_ptr();
        drop(bytes);
        let second = segments.take(1000).unwrap().freeze().unwrap();
        assert_ne!(second.as_ptr(), place, "a part of the first segment is in use");
        assert_eq!(rest, [7; 10][..]);
        drop(rest);
        let third = segments.take(500).unwrap().freeze().unwrap();
        assert_eq!((third.as_ptr(), third.len()), (place, 500));
        assert_eq!(segments.unused().len(), 0);
    }

    #[test]
    fn memory_that_a_dropped_read_still_fills_is_not_used() {
        let segments = SegmentMemory::new(1000);
        let lease = segments.take(1000).unwrap();
        let filling = lease.memory().lend(3..5).unwrap();
        drop(lease);
        assert!(segments.take(1000).unwrap().memory().lend(0..1000).is_ok());
        drop(filling);
    }

    #[test]
    fn short_segments_take_no_more_memory_than_their_bytes() {
        let segments = SegmentMemory::new(1000);
        for byte_len in [0, 499, 1001] {
            let lease = segments.take(byte_len).unwrap();
            assert_eq!(lease.memory().len() as u64, byte_len);
            drop(lease);
        }
        assert_eq!(segments.unused().len(), 0);
    }
}
