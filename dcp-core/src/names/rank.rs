//! The number of a process in a group.

/// A rank of a group, as the group counts.
pub type Rank = u32;
