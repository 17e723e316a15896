//! Keys of a request that a checkpoint lacks, and the reverse.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use dcp_core::text::Quoted;

/// Keys that only the request or only the checkpoint has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyMismatch {
    /// Stored, and requested by no rank.
    pub missing: BTreeSet<Arc<str>>,
    /// Requested by this rank, and not stored.
    pub unexpected: BTreeSet<Arc<str>>,
}

impl KeyMismatch {
    /// Whether both sides have the same keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty()
    }
}

impl fmt::Display for KeyMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 32;
        let mut separator = "request and checkpoint have different keys: ";
        for (keys, what) in [
            (&self.unexpected, "requested but not in the checkpoint"),
            (&self.missing, "in the checkpoint but requested by no rank"),
        ] {
            if keys.is_empty() {
                continue;
            }
            let shown: Vec<String> =
                keys.iter().take(SHOWN).map(|key| Quoted(key).to_string()).collect();
            write!(f, "{separator}{what}: {}", shown.join(", "))?;
            if keys.len() > SHOWN {
                write!(f, " and {} more", keys.len() - SHOWN)?;
            }
            separator = "; ";
        }
        Ok(())
    }
}

impl std::error::Error for KeyMismatch {}

/// A name that is no [`StrictHandling`](crate::StrictHandling).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is not a strict handling; there are {known}", name = Quoted(.name))]
pub struct UnknownStrictHandling {
    pub(crate) name: String,
    /// All names, for the message.
    pub(crate) known: String,
}
