//! Events of saves and loads, for progress bars and metrics.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dcp_core::{CheckpointError, Rank};

/// Receives the events of the saves and loads of one rank, as PyTorch's checkpoint logger does.
///
/// Calls come from the threads of the save or load, and several may come at once. A call that takes
/// long slows it down.
pub trait CheckpointObserver: fmt::Debug + Send + Sync {
    /// Receives an event of this process, which is `rank` in the group of the save or load.
    fn observe(&self, rank: Rank, event: &CheckpointEvent);
}

/// A step of a save or load on one rank.
///
/// A save is `Planned`, then some `Progress`, `Written`, and `Committed`; a load is `Planned`, and
/// `Read`. Either may end with `Failed` instead. Durations are those of the step that ends, and
/// include the wait for other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointEvent {
    /// A background save has copied the state.
    Staged {
        /// The time in which training could not change the state.
        duration: Duration,
    },
    /// All ranks agreed on a plan.
    Planned {
        /// The operation.
        operation: Operation,
        /// Items that this rank writes or reads.
        items: u64,
        /// Bytes that this rank writes or reads.
        bytes: u64,
        /// Whether the plan is that of an earlier save.
        reused: bool,
        /// The duration of planning.
        duration: Duration,
    },
    /// This rank handed bytes of its items to the writer of the format.
    Progress {
        /// Bytes since the last such event.
        bytes: u64,
    },
    /// All ranks have written their items durably. Nothing is visible yet.
    Written {
        /// Bytes that this rank wrote to data files.
        bytes: u64,
        /// The duration of this rank's write, without the wait for other ranks.
        duration: Duration,
        /// The duration until all ranks had written.
        all_ranks: Duration,
    },
    /// The checkpoint is visible.
    Committed {
        /// The duration of the commit.
        duration: Duration,
    },
    /// All ranks have read their items.
    Read {
        /// Bytes of this rank's items.
        bytes_needed: u64,
        /// Bytes that this rank requested from the storage.
        bytes_read: u64,
        /// The duration of this rank's read, without the wait for other ranks.
        duration: Duration,
        /// The duration until all ranks had read.
        all_ranks: Duration,
    },
    /// The save or load failed.
    Failed {
        /// The operation.
        operation: Operation,
        /// The error, as text.
        error: String,
    },
}

/// The operation that an event is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// A save.
    Save,
    /// A load.
    Load,
}

/// The observers of one rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Observers {
    rank: Rank,
    all: Vec<Arc<dyn CheckpointObserver>>,
}

impl Observers {
    pub(crate) fn add(&mut self, observer: Arc<dyn CheckpointObserver>) {
        self.all.push(observer);
    }

    /// Returns the same observers, for events of `rank`.
    pub(crate) fn of_rank(&self, rank: Rank) -> Self {
        Self { rank, all: self.all.clone() }
    }

    pub(crate) fn send(&self, event: &CheckpointEvent) {
        self.all.iter().for_each(|observer| observer.observe(self.rank, event));
    }

    /// Passes a result on, with an event if it is an error.
    pub(crate) fn watch<T>(
        &self,
        operation: Operation,
        result: Result<T, CheckpointError>,
    ) -> Result<T, CheckpointError> {
        if let Err(error) = &result {
            let error = dcp_core::error::error_chain(error);
            self.send(&CheckpointEvent::Failed { operation, error });
        }
        result
    }
}
