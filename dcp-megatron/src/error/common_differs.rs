//! Differences between the common states of ranks.

use std::fmt;

use dcp_core::Rank;
use dcp_core::text::Message;
use serde::{Deserialize, Serialize};

/// Differences that are listed of one rank; the rest is counted.
pub(crate) const LISTED: usize = 64;
/// Of these, those that a message shows.
const SHOWN: usize = 8;

/// The common state differs between ranks. What is stored is that of rank 0, so what other ranks
/// have there would be lost. Every rank of the group gets the same list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CommonDiffers {
    /// Each rank that differs from rank 0, and how.
    pub ranks: Vec<(Rank, CommonDifference)>,
}

/// The differences of a rank's common state from that of rank 0; paths are steps joined by dots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CommonDifference {
    /// Only on rank 0.
    pub only_first: Vec<String>,
    /// Only on this rank.
    pub only_here: Vec<String>,
    /// On both, with other values.
    pub values: Vec<String>,
    /// Differences beyond those that are listed.
    pub more: u64,
}

impl CommonDifference {
    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.only_first.is_empty() && self.only_here.is_empty() && self.values.is_empty()
    }

    pub(crate) fn note(&mut self, list: fn(&mut Self) -> &mut Vec<String>, path: &[String]) {
        let listed = self.only_first.len() + self.only_here.len() + self.values.len();
        if listed < LISTED {
            list(self).push(path.join("."));
        } else {
            self.more += 1;
        }
    }
}

impl fmt::Display for CommonDiffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the common state has to be the same on all ranks: ")?;
        for (at, (rank, difference)) in self.ranks.iter().take(SHOWN).enumerate() {
            write!(f, "{}rank {rank} {difference}", if at == 0 { "" } else { "; " })?;
        }
        if self.ranks.len() > SHOWN {
            write!(f, "; and {} more ranks differ", self.ranks.len() - SHOWN)?;
        }
        f.write_str("; make what differs a sharded object, or drop it from the comparison")
    }
}

impl std::error::Error for CommonDiffers {}

impl fmt::Display for CommonDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("has other values at", &self.values),
            ("has no", &self.only_first),
            ("alone has", &self.only_here),
        ];
        let parts = parts.iter().filter(|(_, paths)| !paths.is_empty()).map(|(what, paths)| {
            let shown: Vec<_> =
                paths.iter().take(SHOWN).map(|path| Message(path).to_string()).collect();
            let more = paths.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{what} {}{more}", shown.join(", "))
        });
        f.write_str(&parts.collect::<Vec<_>>().join(", "))
    }
}
