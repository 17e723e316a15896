//! Stops concurrent writes when one of them fails.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use dcp_core::checkpoint::DataSource;
use dcp_core::storage::OwnThreads;
use dcp_core::{CheckpointError, Payload};
use futures_util::{StreamExt as _, stream};

/// Stops concurrent writes by giving them no more data. Dropping a write is not enough: its thread
/// may still give the file its name. So every write runs to its end, and what it wrote is known and
/// can be removed.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Creates a `Stop` without failures.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a write has failed.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Wraps `data` so that it fails after the first failure of any write.
    #[must_use]
    pub fn guard(&self, data: Arc<dyn DataSource>) -> Arc<dyn DataSource> {
        Arc::new(Guarded { data, stop: self.clone() })
    }

    /// Runs the writes, at most `at_once` at a time, until all have ended. Starts none after the
    /// first failure.
    ///
    /// # Errors
    ///
    /// The first failure itself, not one that follows from it, when all writes have ended.
    pub async fn run<T, F: Future<Output = Result<T, CheckpointError>>>(
        &self,
        writes: impl IntoIterator<Item = F>,
        at_once: usize,
    ) -> Result<Vec<T>, CheckpointError> {
        let writes = writes.into_iter().map(|write| async move {
            if self.is_stopped() {
                return Err(CheckpointError::Canceled);
            }
            write.await.inspect_err(|_| self.0.store(true, Ordering::Relaxed))
        });
        let writes = writes.collect::<Vec<_>>();
        let mut ended = stream::iter(writes).buffered(at_once.max(1));
        let (mut done, mut failed) = (Vec::new(), None);
        while let Some(outcome) = ended.next().await {
            match (outcome, &failed) {
                (Ok(one), _) => done.push(one),
                // A stopped write may end before the one that failed.
                (Err(error), None | Some(CheckpointError::Canceled)) => failed = Some(error),
                (Err(_), Some(_)) => {}
            }
        }
        failed.map_or(Ok(done), Err)
    }
}

#[derive(Debug)]
struct Guarded {
    data: Arc<dyn DataSource>,
    stop: Stop,
}

#[async_trait]
impl DataSource for Guarded {
    async fn resolve(
        &self,
        item: usize,
        byte_range: Range<u64>,
    ) -> Result<Payload, CheckpointError> {
        if self.stop.is_stopped() {
            return Err(CheckpointError::Canceled);
        }
        self.data.resolve(item, byte_range).await
    }

    fn segment_bytes(&self) -> u64 {
        self.data.segment_bytes()
    }

    fn own_threads(&self) -> Option<Arc<dyn OwnThreads>> {
        self.data.own_threads()
    }
}
