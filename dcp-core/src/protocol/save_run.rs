//! Calls a [`StorageWriter`] in the order of its contract.

mod relocate;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::error::{CheckpointError, PlanError, PlanMaker, PlanProblem};
use crate::plans::metadata::CheckpointMetadata;
use crate::plans::plan::{GlobalPlan, SavePlan, WritePlan};
use crate::protocol::checkpoint::{DataSource, SaveSession, StorageWriter, WriteReport};

/// A save that has begun, on the coordinator.
///
/// [`commit`](Self::commit) consumes it and this process's writes, so that nothing is abandoned
/// that a commit may have published, even if it failed.
#[must_use = "commit it; dropping it ends the save with what the writer has claimed"]
pub struct SaveRun<'a> {
    writer: &'a dyn StorageWriter,
    session: SaveSession,
}

impl<'a> SaveRun<'a> {
    /// Begins a save.
    ///
    /// # Errors
    ///
    /// As [`StorageWriter::begin`].
    pub async fn begin(writer: &'a dyn StorageWriter) -> Result<Self, CheckpointError> {
        Ok(Self { writer, session: writer.begin().await? })
    }

    /// The writer's session.
    #[must_use]
    pub fn session(&self) -> &SaveSession {
        &self.session
    }

    /// Assigns a placement to every selected item. Returns the plan of each rank.
    ///
    /// # Errors
    ///
    /// As [`StorageWriter::place`], and when it returns another number of plans than there are
    /// ranks.
    pub fn place(
        &self,
        locals: &[SavePlan],
        global: &mut GlobalPlan,
    ) -> Result<Vec<WritePlan>, CheckpointError> {
        let plans = self.writer.place(&self.session, locals, global)?;
        if plans.len() != locals.len() {
            let (expected, found) = (locals.len(), plans.len());
            let made_by = PlanMaker::Writer;
            return Err(PlanError::Plan(PlanProblem::Count { made_by, expected, found }).into());
        }
        Ok(plans)
    }

    /// Publishes the checkpoint. `own` is what this process wrote, `reports` are those of all
    /// ranks. Returns the index as published: `metadata`, with other placements where the ranks
    /// reported them ([`WriteReport::stored`]).
    ///
    /// # Errors
    ///
    /// As [`StorageWriter::commit`], which removes what was written if that is safe; and when the
    /// ranks reported only some of the placements.
    pub async fn commit<'m>(
        self,
        own: Vec<RankWrite<'_>>,
        metadata: &'m CheckpointMetadata,
        reports: Vec<WriteReport>,
    ) -> Result<Cow<'m, CheckpointMetadata>, CheckpointError> {
        let stored = match relocate::relocated(metadata, &reports) {
            Ok(stored) => stored,
            Err(error) => {
                for write in own {
                    write.abandon().await;
                }
                return Err(error.into());
            }
        };
        drop(own);
        self.writer.commit(self.session, &stored, reports).await?;
        Ok(stored)
    }
}

impl fmt::Debug for SaveRun<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SaveRun").field("session", &self.session).finish_non_exhaustive()
    }
}

/// The write of one rank, until it is committed or abandoned.
pub struct RankWrite<'a> {
    writer: &'a dyn StorageWriter,
    plan: Arc<WritePlan>,
}

impl<'a> RankWrite<'a> {
    /// A write of `plan`.
    pub fn new(writer: &'a dyn StorageWriter, plan: Arc<WritePlan>) -> Self {
        Self { writer, plan }
    }

    /// Writes the items durably.
    ///
    /// # Errors
    ///
    /// As [`StorageWriter::write`]. All ranks then [`abandon`](Self::abandon) the save.
    pub async fn write(
        &self,
        local: &SavePlan,
        data: Arc<dyn DataSource>,
    ) -> Result<WriteReport, CheckpointError> {
        self.writer.write(local, &self.plan, data).await
    }

    /// Removes the files that were written, when nothing of the save can be committed any more.
    pub async fn abandon(self) {
        self.writer.abandon(&self.plan).await;
    }
}

impl fmt::Debug for RankWrite<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankWrite").field("files", &self.plan.files).finish_non_exhaustive()
    }
}
