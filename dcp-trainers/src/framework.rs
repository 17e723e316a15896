//! Programs with a file for each rank as a framework that jobs call.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::OpenedCheckpoint;
use dcp_core::{Storage, StorageError};
use dcp_jobs::framework::{
    Framework, FrameworkCheckpoint, FrameworkTarget, Options, Preparation, RunLayout, Taken,
};
use dcp_jobs::{Checkpoint, Error, Format, JobOptions, Source};

use crate::checkpoint::{NAME, RankCheckpoint};

/// verl, SkyRL, accelerate and torch's `_experimental`, as jobs call them.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_jobs::framework::Frameworks;
/// use dcp_jobs::{Format, Opener};
/// use dcp_trainers::{RankFiles, RankFilesFormat};
///
/// # async fn example(storages: dcp_core::registry::StorageRegistry) -> Result<(), dcp_jobs::Error> {
/// let opener = Opener::new(storages)
///     .formats(dcp_jobs::listing::formats().with(Arc::new(RankFilesFormat)))
///     .frameworks(Frameworks::none().with(Arc::new(RankFiles)));
/// let actor = opener.open("run/global_step_100/actor").await?;
/// actor.convert("actor-hf").to(Format::HuggingFace).run().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct RankFiles;

#[async_trait]
impl Framework for RankFiles {
    fn name(&self) -> &'static str {
        NAME
    }

    fn title(&self) -> &'static str {
        "files of ranks"
    }

    fn checkpoint(&self, opened: &OpenedCheckpoint) -> Option<Arc<dyn FrameworkCheckpoint>> {
        Some(opened.extension::<RankCheckpoint>()?)
    }

    async fn prepare(
        &self,
        source: Source,
        _checkpoint: &Checkpoint,
        _request: &mut Preparation<'_>,
    ) -> Result<Source, Error> {
        Ok(source)
    }

    async fn refuse_state(
        &self,
        _sources: &[&Checkpoint],
        _taken: Taken<'_>,
        _format: Format,
        _options: &Options,
        _job: &JobOptions,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// The programs write them.
    fn target(&self) -> Option<&dyn FrameworkTarget> {
        None
    }

    fn runs(&self) -> Option<&dyn RunLayout> {
        None
    }

    async fn half_replaced(
        &self,
        _storage: &Arc<dyn Storage>,
    ) -> Result<Option<&'static str>, StorageError> {
        Ok(None)
    }
}
