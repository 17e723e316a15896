//! Limits on the resources of one pickle.

/// Limits on the resources that reading a pickle may use.
///
/// Regardless of them, every length in the input is compared with the remaining bytes before
/// anything is allocated, and every opcode creates at most one node.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of memory for nodes, references, stack and memo. Parsing fails beyond it. A short
    /// pickle gets less, in proportion to its length.
    pub bytes: u64,
    /// The nesting depth to which containers are converted; deeper ones are omitted.
    pub depth: usize,
    /// Values to create per node or reference of the arena. Only containers with so many references
    /// that the tree would be much larger than the pickle exceed it.
    pub values_per_node: usize,
}

impl Limits {
    /// Far more than real checkpoints need: a `.metadata` of 200 000 chunks takes a quarter of a
    /// GiB.
    pub const DEFAULT: Self = Self { bytes: 2 << 30, depth: 200, values_per_node: 8 };

    /// Memory for any pickle, and for each of its bytes. Real picklers need less than ten bytes per
    /// byte; a pickle of empty lists needs thirty.
    const BYTES_MIN: u64 = 64 << 20;
    const BYTES_PER_BYTE: u64 = 16;

    /// Sets the memory limit, in bytes.
    #[must_use]
    pub const fn with_bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    /// The memory limit for a pickle of `len` bytes.
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
