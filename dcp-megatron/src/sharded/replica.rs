//! Replica ids of shards.

use std::fmt;

use dcp_core::Dims;

/// The identifier of a shard's replica. By convention of Megatron-Core it has three parts: the copy
/// within the pipeline, the tensor-parallel rank, the data-parallel rank. Only whether all of them
/// are zero means anything.
///
/// ```
/// use dcp_megatron::sharded::ReplicaId;
///
/// assert!(ReplicaId::from([0, 0, 0]).is_main());
/// assert!(!ReplicaId::from((0, 1, 0)).is_main());
/// assert!(ReplicaId::MAIN.is_main());
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplicaId(Option<Dims>);

impl ReplicaId {
    /// The main replica: the one that is written.
    pub const MAIN: Self = Self(None);

    /// Whether this copy is the one that is written: all parts are zero, or there are none.
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.parts().iter().all(|part| *part == 0)
    }

    /// The parts; none for [`ReplicaId::MAIN`].
    #[must_use]
    pub fn parts(&self) -> &[u64] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl fmt::Debug for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ReplicaId {
    /// `(0, 1, 0)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.parts().iter().map(ToString::to_string).collect();
        write!(f, "({})", parts.join(", "))
    }
}

impl From<u64> for ReplicaId {
    fn from(id: u64) -> Self {
        Self(Some([id].into()))
    }
}

impl From<(u64, u64, u64)> for ReplicaId {
    fn from((pipeline, tensor, data): (u64, u64, u64)) -> Self {
        Self(Some([pipeline, tensor, data].into()))
    }
}

impl<const N: usize> From<[u64; N]> for ReplicaId {
    fn from(parts: [u64; N]) -> Self {
        Self(Some(parts.into()))
    }
}

impl From<&[u64]> for ReplicaId {
    fn from(parts: &[u64]) -> Self {
        Self(Some(parts.into()))
    }
}
