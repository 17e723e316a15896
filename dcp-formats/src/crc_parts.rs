//! Combines CRC-32s of byte ranges that arrive in any order.

use std::collections::BTreeMap;

use crc32fast::Hasher;
use dcp_core::FormatError;

/// CRC-32s of disjoint parts; adjacent parts are merged.
#[derive(Clone, Debug, Default)]
pub struct CrcParts {
    /// By start of a part: its end, and its CRC-32.
    parts: BTreeMap<u64, (u64, Hasher)>,
}

impl CrcParts {
    /// Creates an empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes `start..end` and merges them with adjacent parts. Returns false, and adds
    /// nothing, if they overlap a part.
    pub fn add(&mut self, start: u64, end: u64, crc32: Hasher) -> bool {
        let before = self.parts.range(..end).next_back().map(|(at, (end, _))| (*at, *end));
        let (mut from, mut to, mut crc) = (start, end, crc32);
        if let Some((at, its_end)) = before {
            if its_end > start {
                return false;
            }
            if its_end == start
                && let Some((_, mut first)) = self.parts.remove(&at)
            {
                first.combine(&crc);
                (from, crc) = (at, first);
            }
        }
        if let Some((its_end, next)) = self.parts.remove(&to) {
            crc.combine(&next);
            to = its_end;
        }
        self.parts.insert(from, (to, crc));
        true
    }

    /// The CRC-32 of `byte_len` bytes, if the parts cover them.
    #[must_use]
    pub fn whole(&self, byte_len: u64) -> Option<u32> {
        let (only, (end, hasher)) = self.parts.first_key_value()?;
        (*only == 0 && *end == byte_len).then(|| hasher.clone().finalize())
    }

    /// The parts in order: start, end, and the CRC-32 of the bytes between.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64, u32)> + '_ {
        self.parts.iter().map(|(start, (end, crc32))| (*start, *end, crc32.clone().finalize()))
    }

    /// The number of parts that are not adjacent.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether there are no parts.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The total size of the parts in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.parts.iter().map(|(start, (end, _))| end - start).sum()
    }
}

/// Compares the CRC-32 of a record's data with the `expected` one; `start` is its offset, for the error.
pub(crate) fn compare_crc32(found: u32, expected: u32, start: u64) -> Result<(), FormatError> {
    if found == expected {
        return Ok(());
    }
    let problem = format!("its CRC-32 is {found:08x}, not {expected:08x}: the data is damaged");
    Err(FormatError::new("archive record", problem).at(start))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_in_any_order_make_the_checksum_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 1..200),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
            order in any::<u64>(),
        ) {
            let mut ends: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
            ends.extend([0, bytes.len()]);
            ends.sort_unstable();
            ends.dedup();
            let mut ranges: Vec<_> = ends.windows(2).map(|pair| pair[0]..pair[1]).collect();
            ranges.sort_by_key(|range| (range.start as u64 + 1).wrapping_mul(order | 1));
            let mut parts = CrcParts::new();
            for range in ranges {
                prop_assert_eq!(parts.whole(bytes.len() as u64), None);
                let mut hasher = Hasher::new();
                hasher.update(&bytes[range.clone()]);
                prop_assert!(parts.add(range.start as u64, range.end as u64, hasher));
            }
            prop_assert_eq!((parts.len(), parts.byte_len()), (1, bytes.len() as u64));
            prop_assert_eq!(parts.whole(bytes.len() as u64), Some(crc32fast::hash(&bytes)));
        }
    }

    #[test]
    fn what_is_read_twice_does_not_count_twice() {
        let mut parts = CrcParts::new();
        assert!(parts.add(0, 4, Hasher::new()));
        assert!(!parts.add(3, 5, Hasher::new()));
        assert_eq!(parts.byte_len(), 4);
    }
}
