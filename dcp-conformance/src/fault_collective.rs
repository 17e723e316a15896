//! A collective decorator that fails at a chosen operation of one rank.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use dcp_core::{Collective, CollectiveError, Rank};

/// The fault of a [`FaultCollective`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CollectiveFault {
    /// The rank dies: its member of the group is dropped, and all further calls on it fail. The
    /// others see a dead peer.
    Die,
    /// The rank aborts the group for this reason.
    Abort(String),
    /// This and every later operation fails on this rank only. The others see a silent peer.
    Fail(CollectiveError),
    /// The rank is late by this duration.
    Stall(Duration),
}

/// A member of a group that fails in one of its operations.
///
/// Every call but `rank`, `world_size` and `abort` is an operation; operations count from 1.
pub struct FaultCollective {
    rank: Rank,
    world_size: u32,
    /// `None` after the rank died.
    inner: Mutex<Option<Arc<dyn Collective>>>,
    operation: u64,
    fault: CollectiveFault,
    begun: AtomicU64,
    sleep: Box<dyn Fn(Duration) + Send + Sync>,
}

impl FaultCollective {
    /// Applies `fault` to operation number `operation` of `inner`, counted from 1.
    #[must_use]
    pub fn new(inner: Box<dyn Collective>, operation: u64, fault: CollectiveFault) -> Self {
        Self {
            rank: inner.rank(),
            world_size: inner.world_size(),
            inner: Mutex::new(Some(Arc::from(inner))),
            operation,
            fault,
            begun: AtomicU64::new(0),
            sleep: Box::new(std::thread::sleep),
        }
    }

    /// Replaces the function that waits.
    #[cfg(test)]
    pub(crate) fn with_sleep(mut self, sleep: impl Fn(Duration) + Send + Sync + 'static) -> Self {
        self.sleep = Box::new(sleep);
        self
    }

    /// The number of operations begun, including failed ones.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    fn inner(&self) -> Option<Arc<dyn Collective>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn run<T>(
        &self,
        op: &'static str,
        run: impl FnOnce(&dyn Collective) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        if number == self.operation {
            match &self.fault {
                CollectiveFault::Die => {
                    self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
                }
                CollectiveFault::Abort(reason) => self.abort(reason),
                CollectiveFault::Stall(delay) => (self.sleep)(*delay),
                CollectiveFault::Fail(_) => {}
            }
        }
        if let CollectiveFault::Fail(error) = &self.fault
            && number >= self.operation
        {
            return Err(error.clone());
        }
        match self.inner() {
            Some(inner) => run(&*inner),
            None => Err(CollectiveError::PeerLost {
                rank: self.rank,
                op,
                message: format!("injected at operation {}", self.operation),
            }),
        }
    }
}

impl fmt::Debug for FaultCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultCollective")
            .field("rank", &self.rank)
            .field("operation", &self.operation)
            .field("fault", &self.fault)
            .finish_non_exhaustive()
    }
}

impl Collective for FaultCollective {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> u32 {
        self.world_size
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.run("gather", |inner| inner.gather(root, mine))
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        self.run("scatter", |inner| inner.scatter(root, all))
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        self.run("broadcast", |inner| inner.broadcast(root, from_root))
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.run("all_gather", |inner| inner.all_gather(mine))
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.run("barrier", |inner| inner.barrier())
    }

    fn abort(&self, reason: &str) {
        if let Some(inner) = self.inner() {
            inner.abort(reason);
        }
    }
}
