//! A collective decorator that delays one rank.

use std::time::Duration;

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError, Rank};

/// A member of a group that is late in every operation.
#[derive(Debug)]
pub struct SlowCollective {
    inner: Box<dyn Collective>,
    delay: Duration,
}

impl SlowCollective {
    /// Delays every operation of `inner` by `delay`, except `abort`.
    #[must_use]
    pub fn new(inner: Box<dyn Collective>, delay: Duration) -> Self {
        Self { inner, delay }
    }

    fn late(&self) -> &dyn Collective {
        std::thread::sleep(self.delay);
        &*self.inner
    }
}

impl Collective for SlowCollective {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.late().gather(root, mine)
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.late().scatter(root, all)
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        self.late().broadcast(root, from_root)
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.late().all_gather(mine)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.late().barrier()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}
