//! DeepSpeed as a framework that jobs call.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::OpenedCheckpoint;
use dcp_core::{Storage, StorageError};
use dcp_jobs::framework::{
    Framework, FrameworkCheckpoint, FrameworkTarget, Options, Preparation, RunLayout, Taken,
};
use dcp_jobs::{Checkpoint, Error, Format, JobOptions, Source};

use crate::checkpoint::{DeepSpeedCheckpoint, NAME};

/// DeepSpeed, as jobs call it: its checkpoints are read as whole tensors by name.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_deepspeed::{DeepSpeed, DeepSpeedFormat};
/// use dcp_jobs::framework::Frameworks;
/// use dcp_jobs::{Format, Opener};
///
/// # async fn example(storages: dcp_core::registry::StorageRegistry) -> Result<(), dcp_jobs::Error> {
/// let opener = Opener::new(storages)
///     .formats(dcp_jobs::listing::formats().with(Arc::new(DeepSpeedFormat)))
///     .frameworks(Frameworks::none().with(Arc::new(DeepSpeed)));
/// let checkpoint = opener.open("run/global_step1000").await?;
/// checkpoint.convert("converted").to(Format::Dcp).run().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct DeepSpeed;

#[async_trait]
impl Framework for DeepSpeed {
    fn name(&self) -> &'static str {
        NAME
    }

    fn title(&self) -> &'static str {
        "DeepSpeed"
    }

    fn checkpoint(&self, opened: &OpenedCheckpoint) -> Option<Arc<dyn FrameworkCheckpoint>> {
        Some(opened.extension::<DeepSpeedCheckpoint>()?)
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

    /// DeepSpeed writes them.
    fn target(&self) -> Option<&dyn FrameworkTarget> {
        None
    }

    /// DeepSpeed writes its tracker itself.
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
