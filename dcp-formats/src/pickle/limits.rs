//! How much one pickle may ask for.

/// Bounds on what a pickle may make its reader do.
///
/// Independent of them, every length that the input claims is compared with the bytes that are
/// left before anything is allocated, and every opcode makes at most one node.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Nodes of the arena, beyond which parsing fails.
    pub nodes: u32,
    /// Levels of containers that conversion to a value descends; what lies deeper is left out.
    pub depth: usize,
    /// Values that conversion makes for each node or reference of the arena, which is exceeded
    /// only by containers shared so often that the tree would be much larger than the pickle.
    pub values_per_node: usize,
}

impl Limits {
    /// Far more than real checkpoints have: a `.metadata` takes about thirty nodes per chunk.
    pub const DEFAULT: Self = Self { nodes: 1 << 30, depth: 200, values_per_node: 8 };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
