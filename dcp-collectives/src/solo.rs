//! A group of one.

use std::sync::OnceLock;

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError, Rank};

use crate::call::{Call, Op, Passed};
use crate::poison::Poison;

/// The group of a process that is alone: PyTorch's `no_dist`. Nothing blocks.
#[derive(Debug, Default)]
pub struct Solo {
    failed: OnceLock<CollectiveError>,
}

impl Solo {
    /// A group of one rank.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn enter(&self, call: Call, passed: Passed<'_>) -> Result<(), CollectiveError> {
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        Poison::check(call, 0, 1, passed)
            .map_err(|poison| self.failed.get_or_init(|| poison.seen_by(0)).clone())
    }
}

impl Collective for Solo {
    fn rank(&self) -> Rank {
        0
    }

    fn world_size(&self) -> u32 {
        1
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.enter(Call::new(Op::Gather, root), Passed::Mine)?;
        Ok(Some(vec![mine]))
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.enter(Call::new(Op::Scatter, root), Passed::All(all.as_deref()))?;
        Ok(all.and_then(|mut all| all.pop()).unwrap_or_default())
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        self.enter(Call::new(Op::Broadcast, root), Passed::Maybe(from_root.is_some()))?;
        Ok(from_root.unwrap_or_default())
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.enter(Call::new(Op::AllGather, 0), Passed::Mine)?;
        Ok(vec![mine])
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.enter(Call::new(Op::Barrier, 0), Passed::Mine)
    }

    fn abort(&self, reason: &str) {
        self.failed.get_or_init(|| CollectiveError::Aborted { rank: 0, reason: reason.to_owned() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_returns_what_was_passed() {
        let solo = Solo::new();
        let message = Bytes::from_static(b"m");
        assert_eq!(solo.gather(0, message.clone()), Ok(Some(vec![message.clone()])));
        assert_eq!(solo.scatter(0, Some(vec![message.clone()])), Ok(message.clone()));
        assert_eq!(solo.broadcast(0, Some(message.clone())), Ok(message.clone()));
        assert_eq!(solo.all_gather(message.clone()), Ok(vec![message]));
        assert_eq!(solo.barrier(), Ok(()));
    }

    #[test]
    fn an_abort_and_a_wrong_call_stay() {
        let solo = Solo::new();
        solo.abort("enough");
        let aborted = CollectiveError::Aborted { rank: 0, reason: "enough".into() };
        assert_eq!(solo.barrier(), Err(aborted.clone()));
        solo.abort("again");
        assert_eq!(solo.barrier(), Err(aborted));

        let solo = Solo::new();
        let error = solo.gather(1, Bytes::new()).unwrap_err();
        assert!(matches!(error, CollectiveError::Mismatch { rank: 0, op: "gather", .. }));
        assert_eq!(solo.barrier(), Err(error));
    }
}
