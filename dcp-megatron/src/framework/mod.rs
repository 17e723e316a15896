//! Megatron-Core as a framework that jobs call.

mod common_state;
mod optimizer_options;
mod target;

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::OpenedCheckpoint;
use dcp_core::value::Dict;
use dcp_core::{Storage, StorageError};
use dcp_jobs::framework::{
    Framework, FrameworkCheckpoint, FrameworkTarget, Options, PluginReport, Preparation, RunLayout,
    Taken,
};
use dcp_jobs::run::StepNaming;
use dcp_jobs::verify::VerifyReport;
use dcp_jobs::{Checkpoint, Error, Format, JobOptions, Source};

pub use common_state::{arguments, common_state};
pub use optimizer_options::{OptimizerForm, OptimizerOptions};
use optimizer_options::{problem, refuse_corrupt};
use target::TorchDist;
pub use target::{MegatronTarget, TORCH_DIST};

use crate::disk::recovery::{HALF_REPLACED, recovered};
use crate::disk::tracker::Tracked;
use crate::jobs::verify::verify_opened;
use crate::open::checkpoint::{MegatronCheckpoint, StoredFormat};
use crate::open::run::write_tracker;

/// The name of the format and of what `Checkpoint::inspect` shows of it.
const NAME: &str = "megatron";
/// The functions that print the common state, and the arguments in it, for messages.
const COMMON: &str = "`framework::common_state`";
const ARGUMENTS: &str = "`framework::arguments`";

/// Megatron-Core, as jobs call it: [`MegatronTarget`] and [`OptimizerOptions`] are its options,
/// [`MegatronCheckpoint`] its checkpoints, the common state what it has beside tensors.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_jobs::Opener;
/// use dcp_jobs::framework::Frameworks;
/// use dcp_megatron::MegatronCoreFormat;
/// use dcp_megatron::framework::{Megatron, MegatronTarget};
///
/// # async fn example(storages: dcp_core::registry::StorageRegistry) -> Result<(), dcp_jobs::Error> {
/// let opener = Opener::new(storages)
///     .formats(dcp_jobs::listing::formats().with(Arc::new(MegatronCoreFormat)))
///     .frameworks(Frameworks::none().with(Arc::new(Megatron)));
/// let checkpoint = opener.open("run/iter_0001000").await?;
/// checkpoint.reshard("resharded").with(MegatronTarget::new().tp(4).pp(2)).run().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Megatron;

#[async_trait]
impl Framework for Megatron {
    fn name(&self) -> &'static str {
        NAME
    }

    fn title(&self) -> &'static str {
        "Megatron-Core"
    }

    fn checkpoint(&self, opened: &OpenedCheckpoint) -> Option<Arc<dyn FrameworkCheckpoint>> {
        Some(opened.extension::<MegatronCheckpoint>()?)
    }

    async fn prepare(
        &self,
        source: Source,
        checkpoint: &Checkpoint,
        request: &mut Preparation<'_>,
    ) -> Result<Source, Error> {
        let options = request.options.get::<OptimizerOptions>().copied().unwrap_or_default();
        let taken = request.taken(&source).await?;
        options.apply(source, checkpoint, &taken, request.job, request.notes).await
    }

    async fn refuse_state(
        &self,
        sources: &[&Checkpoint],
        taken: Taken<'_>,
        _format: Format,
        options: &Options,
        job: &JobOptions,
    ) -> Result<(), Error> {
        let options = options.get::<OptimizerOptions>().copied().unwrap_or_default();
        refuse_corrupt(options, sources, taken, job).await
    }

    fn target(&self) -> Option<&dyn FrameworkTarget> {
        Some(&TorchDist)
    }

    fn runs(&self) -> Option<&dyn RunLayout> {
        Some(self)
    }

    async fn half_replaced(
        &self,
        storage: &Arc<dyn Storage>,
    ) -> Result<Option<&'static str>, StorageError> {
        let is_itself = Arc::ptr_eq(&recovered(storage).await?, storage);
        Ok((!is_itself).then_some(HALF_REPLACED))
    }
}

#[async_trait]
impl RunLayout for Megatron {
    fn naming(&self) -> StepNaming {
        StepNaming::Iteration
    }

    async fn note_latest(&self, storage: &dyn Storage, step: u64) -> Result<(), Error> {
        Ok(write_tracker(storage, Tracked::Iteration(step)).await?)
    }
}

#[async_trait]
impl FrameworkCheckpoint for MegatronCheckpoint {
    fn stored(&self) -> Option<&Source> {
        self.raw()
    }

    fn damage(&self) -> &[String] {
        Self::damage(self)
    }

    fn is_of_ranks(&self) -> bool {
        matches!(self.format(), StoredFormat::Legacy { .. })
    }

    fn arguments(&self) -> Option<Dict> {
        self.args().map(|args| args.dict().clone())
    }

    fn shown_by(&self, key: &str) -> Option<&'static str> {
        self.common().get(key)?;
        Some(if key == "args" { ARGUMENTS } else { COMMON })
    }

    async fn describe(&self) -> Result<PluginReport, Error> {
        PluginReport::new(NAME, Self::describe(self).await?)
    }

    /// The optimizer's state is compared with the model.
    async fn verify(&self, deep: bool, job: &JobOptions) -> Result<VerifyReport, Error> {
        let mut report = verify_opened(self, deep, job).await?;
        report.format = format!("{NAME}_{}", Self::describe(self).await?.format);
        Ok(report)
    }

    async fn state_problem(
        &self,
        uri: &str,
        taken: Taken<'_>,
        job: &JobOptions,
    ) -> Result<Option<String>, Error> {
        problem(uri, self, taken, job).await
    }
}
