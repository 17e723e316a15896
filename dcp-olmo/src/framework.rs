//! OLMo-core as a framework that jobs call.

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::OpenedCheckpoint;
use dcp_core::{Storage, StorageError};
use dcp_jobs::framework::{
    Concern, Framework, FrameworkCheckpoint, FrameworkOptions, FrameworkTarget, Options,
    Preparation, RunLayout, Taken,
};
use dcp_jobs::keys::StatePart;
use dcp_jobs::{Checkpoint, Error, ErrorKind, FileJob, Format, JobOptions, Source};

use crate::layout::{OptimizerLayout, source_with_layout};
use crate::unshard::{UnshardOptions, UnshardReport, unshard_checkpoint};

/// The name of the framework.
const NAME: &str = "olmo-core";
/// The option, as messages name it.
const SETTER: &str = "`OptimizerLayout`";

/// OLMo-core, as jobs call it: [`OptimizerLayout`] is its option of jobs that write, [`UnshardOptions`] a job
/// that writes plain files.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_jobs::framework::Frameworks;
/// use dcp_jobs::{Opener, Rollback};
/// use dcp_jobs::JobOptions;
/// use dcp_olmo::{Olmo, OlmoFormat, OptimizerLayout, UnshardOptions};
///
/// # async fn example(storages: dcp_core::registry::StorageRegistry) -> Result<(), dcp_jobs::Error> {
/// let opener = Opener::new(storages)
///     .formats(dcp_jobs::listing::formats().with(Arc::new(OlmoFormat)))
///     .frameworks(Frameworks::none().with(Arc::new(Olmo)));
/// let step = opener.open("run/step1000").await?;
/// step.reshard("nested").ranks(8).with(OptimizerLayout::Nested).run().await?;
///
/// let files = UnshardOptions::default().optim(true);
/// let report = step.write_files("out", &files, &Rollback::new(), &JobOptions::default()).await?;
/// println!("{} files", report.files.len());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Olmo;

#[async_trait]
impl Framework for Olmo {
    /// Not the name of a format: a step is opened as the checkpoint of PyTorch's that is in it.
    fn name(&self) -> &'static str {
        NAME
    }

    fn title(&self) -> &'static str {
        "OLMo-core"
    }

    /// A step of OLMo-core has all of its state in the checkpoint of PyTorch's format that is in it.
    fn checkpoint(&self, _opened: &OpenedCheckpoint) -> Option<Arc<dyn FrameworkCheckpoint>> {
        None
    }

    /// Divides the optimizer's state as the options have it, if there is one.
    async fn prepare(
        &self,
        source: Source,
        _checkpoint: &Checkpoint,
        request: &mut Preparation<'_>,
    ) -> Result<Source, Error> {
        match request.options.get::<OptimizerLayout>() {
            None => Ok(source),
            Some(layout) if OptimizerLayout::of(&*source.metadata().await?).is_some() => {
                Ok(source_with_layout(&source, *layout, request.job).await?)
            }
            Some(_) => {
                let message = "`OptimizerLayout` finds no optimizer that is divided by parameter";
                Err(Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out"))
            }
        }
    }

    async fn refuse_state(
        &self,
        _sources: &[&Checkpoint],
        _taken: Taken<'_>,
        _format: Format,
        options: &Options,
        _job: &JobOptions,
    ) -> Result<(), Error> {
        match options.get::<OptimizerLayout>() {
            None => Ok(()),
            Some(layout) => Err(layout.is_for_one()),
        }
    }

    /// Its checkpoints are written as those of PyTorch.
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

impl OptimizerLayout {
    /// The error in a job on several checkpoints.
    fn is_for_one(self) -> Error {
        let message = format!("{SETTER} is for one checkpoint, and this is made of several");
        let hint = "write each of them with it first, by `Checkpoint::convert`";
        Error::new(ErrorKind::InvalidOption, message).with_hint(hint)
    }
}

impl FrameworkOptions for OptimizerLayout {
    fn taken_by(&self) -> &'static str {
        NAME
    }

    fn concern(&self) -> Concern {
        Concern::Optimizer
    }

    fn subject(&self) -> &'static str {
        SETTER
    }

    fn given(&self) -> Option<&'static str> {
        Some(SETTER)
    }
}

#[async_trait]
impl FileJob for UnshardOptions {
    type Report = UnshardReport;

    fn name(&self) -> &'static str {
        "unshard"
    }

    fn part(&self) -> StatePart {
        if self.writes_optim() { StatePart::Everything } else { StatePart::Model }
    }

    /// Writes what is below `model` of the state dict, as OLMo-core's `unshard_checkpoint` does.
    async fn write(
        &self,
        source: &Source,
        storage: &Arc<dyn Storage>,
        job: &JobOptions,
    ) -> Result<UnshardReport, Error> {
        Ok(unshard_checkpoint(source, storage, self, job).await?)
    }
}
