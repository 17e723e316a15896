//! Settings of a local group, and running one.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use dcp_core::{CollectiveError, Rank};

use super::LocalCollective;
use super::shared::Shared;
use crate::deadline::DEFAULT_DEADLINE;

/// Settings of a group of [`LocalCollective`]s.
#[derive(Clone, Debug)]
pub struct LocalGroup {
    world_size: u32,
    deadline: Duration,
}

impl LocalGroup {
    /// A group of `world_size` ranks.
    #[must_use]
    pub fn new(world_size: u32) -> Self {
        Self { world_size, deadline: DEFAULT_DEADLINE }
    }

    /// The longest that a call waits for the other ranks.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The handles, in rank order.
    #[must_use]
    pub fn build(self) -> Vec<LocalCollective> {
        self.handles(&Shared::new(self.world_size, self.deadline, false))
    }

    /// Runs `rank_main` on a thread for each rank and returns their results, in rank order.
    ///
    /// A rank that panics aborts the group with the panic's message, which is also its own result.
    pub fn run<T, E, F>(self, rank_main: F) -> Vec<Result<T, E>>
    where
        T: Send,
        E: From<CollectiveError> + Send,
        F: Fn(LocalCollective) -> Result<T, E> + Sync,
    {
        let shared = Shared::new(self.world_size, self.deadline, true);
        let (shared, rank_main) = (&shared, &rank_main);
        thread::scope(|scope| {
            let threads = self
                .handles(shared)
                .into_iter()
                .map(|handle| {
                    let rank = handle.rank;
                    let run = move || supervise(shared, rank, || rank_main(handle));
                    let spawned = thread::Builder::new()
                        .name(format!("rank {rank}"))
                        .spawn_scoped(scope, run);
                    (rank, spawned)
                })
                .collect::<Vec<_>>();
            let join =
                |(rank, spawned): (Rank, std::io::Result<thread::ScopedJoinHandle<'_, _>>)| {
                    match spawned {
                        Ok(thread) => thread
                            .join()
                            .unwrap_or_else(|panic| Err(aborted(rank, message(&*panic)).into())),
                        Err(error) => Err(aborted(rank, format!("no thread: {error}")).into()),
                    }
                };
            threads.into_iter().map(join).collect()
        })
    }

    fn handles(&self, shared: &Arc<Shared>) -> Vec<LocalCollective> {
        (0..self.world_size).map(|rank| LocalCollective::of(Arc::clone(shared), rank)).collect()
    }
}

fn supervise<T, E: From<CollectiveError>>(
    shared: &Shared,
    rank: Rank,
    rank_main: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    catch_unwind(AssertUnwindSafe(rank_main)).unwrap_or_else(|panic| {
        let reason = message(&*panic);
        shared.abort(rank, &reason);
        Err(aborted(rank, reason).into())
    })
}

fn aborted(rank: Rank, reason: String) -> CollectiveError {
    CollectiveError::Aborted { rank, reason }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a value that is not a string");
    format!("panicked: {text}")
}
