//! How much one pickle may ask for.

/// Bounds on what a pickle may make its reader do.
///
/// Independent of them, every length that the input claims is compared with the bytes that are
/// left before anything is allocated, and every opcode makes at most one node.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of memory for nodes, references, stack and memo, beyond which parsing fails; a
    /// short pickle gets less, in proportion to its length.
    pub bytes: u64,
    /// Levels of containers that conversion to a value descends; what lies deeper is left out.
    pub depth: usize,
    /// Values that conversion makes for each node or reference of the arena, which is exceeded
    /// only by containers shared so often that the tree would be much larger than the pickle.
    pub values_per_node: usize,
}

impl Limits {
    /// Far more than real checkpoints need: a `.metadata` of 200 000 chunks takes a quarter GiB.
    pub const DEFAULT: Self = Self { bytes: 2 << 30, depth: 200, values_per_node: 8 };

    /// Memory that any pickle may have, and more for each of its bytes: what real picklers write
    /// takes less than ten, a pickle of nothing but empty lists takes thirty.
    const BYTES_MIN: u64 = 64 << 20;
    const BYTES_PER_BYTE: u64 = 16;

    /// The same, with so much memory at most.
    #[must_use]
    pub const fn with_bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    /// The memory for a pickle of `len` bytes.
    pub(super) fn memory(&self, len: usize) -> u64 {
        let earned = (len as u64).saturating_mul(Self::BYTES_PER_BYTE);
        self.bytes.min(earned.saturating_add(Self::BYTES_MIN))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
