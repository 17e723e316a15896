//! A writer decorator whose commit takes effect and then fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use dcp_core::checkpoint::{DataSource, SaveSession, WriteReport};
use dcp_core::error::StorageOp;
use dcp_core::plan::{GlobalPlan, SavePlan, WritePlan};
use dcp_core::{
    CheckpointError, CheckpointMetadata, Key, Storage, StorageError, StorageErrorKind,
    StorageWriter, Value,
};

/// A [`StorageWriter`] whose commit publishes the checkpoint and then fails, like one whose reply
/// is lost, and whose `abandon` deletes every file of the plan. A driver that abandons a save after
/// its commit destroys the checkpoint.
#[derive(Debug)]
pub struct FaultWriter<W> {
    inner: W,
    storage: Arc<dyn Storage>,
    committed: AtomicBool,
}

impl<W: StorageWriter> FaultWriter<W> {
    /// Wraps `inner`, which writes to `storage`.
    #[must_use]
    pub fn new(inner: W, storage: Arc<dyn Storage>) -> Self {
        Self { inner, storage, committed: AtomicBool::new(false) }
    }

    /// Whether the checkpoint was published.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.committed.load(Ordering::Acquire)
    }
}

#[async_trait]
impl<W: StorageWriter> StorageWriter for FaultWriter<W> {
    fn encode_object(&self, fqn: &str, value: &Value) -> Result<Bytes, CheckpointError> {
        self.inner.encode_object(fqn, value)
    }

    async fn begin(&self) -> Result<SaveSession, CheckpointError> {
        self.inner.begin().await
    }

    fn place(
        &self,
        session: &SaveSession,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError> {
        self.inner.place(session, locals, global)
    }

    fn renamed(&self, file: &Key, generation: u64) -> Result<Key, CheckpointError> {
        self.inner.renamed(file, generation)
    }

    async fn write(
        &self,
        local: &SavePlan,
        plan: &WritePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError> {
        self.inner.write(local, plan, data).await
    }

    async fn commit(
        &self,
        session: SaveSession,
        metadata: &CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<(), CheckpointError> {
        self.inner.commit(session, metadata, reports).await?;
        self.committed.store(true, Ordering::Release);
        let error = StorageError::new(StorageErrorKind::Other, StorageOp::Put, None);
        Err(error.with_message("injected after the commit").into())
    }

    async fn abandon(&self, plan: &WritePlan) {
        for file in &plan.files {
            let _ = self.storage.delete(std::slice::from_ref(file)).await;
        }
    }
}
