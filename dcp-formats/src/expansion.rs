//! The expansion limit of compressed items, which readers apply and writers keep.

/// The maximum ratio of decompressed to stored size beyond the sizes that are always allowed. Only
/// near-zero data exceeds it.
const RATIO_MAX: u64 = 256;
/// The size to which an object may always be decompressed, in bytes.
const OBJECT_ALWAYS: u64 = 64 << 20;
/// The maximum size of an object that was compressed, in bytes.
const OBJECT_MAX: u64 = 1 << 30;
/// The size to which a chunk may always be decompressed, even if only a part of it is needed.
const CHUNK_ALWAYS: u64 = 1 << 30;

/// The kind of an item: objects are needed whole, and their size is in no index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemKind {
    Object,
    Chunk,
}

impl ItemKind {
    pub(crate) fn of(is_tensor: bool) -> Self {
        if is_tensor { Self::Chunk } else { Self::Object }
    }

    fn always(self) -> u64 {
        match self {
            Self::Object => OBJECT_ALWAYS,
            Self::Chunk => CHUNK_ALWAYS,
        }
    }

    fn max(self) -> u64 {
        match self {
            Self::Object => OBJECT_MAX,
            Self::Chunk => u64::MAX,
        }
    }

    /// The maximum size of an item of which `stored` bytes are stored, in bytes. `allowed` bytes are
    /// within the limit of the caller.
    pub(crate) fn expanded_max(self, stored: u64, allowed: u64) -> u64 {
        stored.saturating_mul(RATIO_MAX).max(self.always()).max(allowed).min(self.max())
    }

    /// The minimum number of stored bytes with which every reader decompresses an item of `byte_len`
    /// bytes; `None` if it decompresses no item of that size.
    #[cfg(feature = "zstd")]
    pub(crate) fn stored_min(self, byte_len: u64) -> Option<u64> {
        if byte_len > self.max() {
            return None;
        }
        Some(if byte_len > self.always() { byte_len.div_ceil(RATIO_MAX) } else { 0 })
    }
}

#[cfg(all(test, feature = "zstd"))]
mod tests {
    use super::*;

    #[test]
    fn what_a_writer_stores_is_within_the_limit_of_readers() {
        let lens = [0, 1, OBJECT_ALWAYS, OBJECT_MAX, CHUNK_ALWAYS, 1 << 42, u64::MAX];
        let lens = lens.into_iter().flat_map(|len| [len.saturating_sub(1), len, len | 1]);
        for byte_len in lens {
            for kind in [ItemKind::Object, ItemKind::Chunk] {
                let Some(stored) = kind.stored_min(byte_len) else {
                    assert!(kind == ItemKind::Object && byte_len > OBJECT_MAX);
                    assert!(kind.expanded_max(byte_len, byte_len) < byte_len);
                    continue;
                };
                assert!(kind.expanded_max(stored, 0) >= byte_len, "{kind:?} of {byte_len}");
                // No byte more than the limit needs.
                let fewer = stored.checked_sub(1).map(|fewer| kind.expanded_max(fewer, 0));
                assert!(fewer.is_none_or(|max| max < byte_len), "{kind:?} of {byte_len}");
            }
        }
    }
}
