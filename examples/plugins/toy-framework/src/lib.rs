//! A training framework in a crate of its own, as an example for authors of frameworks.
//!
//! Its checkpoints are those of `toy-format`. To jobs it adds a description, a target with an option of its own
//! (`toy-ranks`, which gives every rank a file as [`ToyRanks`] says), and a tracker of its runs.

#![warn(missing_docs)]

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::OpenedCheckpoint;
use dcp_core::storage::PutMode;
use dcp_core::value::Dict;
use dcp_core::{CheckpointMetadata, Key, Storage, StorageError};
use dcp_jobs::framework::{
    Concern, Framework, FrameworkCheckpoint, FrameworkOptions, FrameworkTarget, Options,
    PluginReport, Preparation, RunLayout, Taken, TargetLayout, TargetRequest,
};
use dcp_jobs::run::StepNaming;
use dcp_jobs::verify::VerifyReport;
use dcp_jobs::write::ConversionReport;
use dcp_jobs::{Checkpoint, Error, Format, JobOptions, Source};
use serde::Serialize;
use toy_format::ToyWriter;

/// The target of conversions.
pub const TOY_RANKS: Format = Format::Registered(TARGET);

const TARGET: &str = "toy-ranks";
const TRACKER: &str = "latest.toy";

/// The framework.
#[derive(Clone, Copy, Debug, Default)]
pub struct Toy;

/// The ranks that a checkpoint is written for.
#[derive(Clone, Copy, Debug)]
pub struct ToyRanks(pub u32);

/// What the framework says of a checkpoint.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct ToyDescription {
    /// Its files.
    pub files: usize,
}

/// A checkpoint of the framework.
#[derive(Debug)]
struct ToyCheckpoint {
    source: Source,
}

#[async_trait]
impl Framework for Toy {
    fn name(&self) -> &'static str {
        "toy"
    }

    fn title(&self) -> &'static str {
        "Toy"
    }

    fn checkpoint(&self, opened: &OpenedCheckpoint) -> Option<Arc<dyn FrameworkCheckpoint>> {
        let source = Source::new(Arc::clone(&opened.storage), Arc::clone(&opened.reader));
        Some(Arc::new(ToyCheckpoint { source }))
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

    fn target(&self) -> Option<&dyn FrameworkTarget> {
        Some(self)
    }

    fn runs(&self) -> Option<&dyn RunLayout> {
        Some(self)
    }

    async fn half_replaced(
        &self,
        _storage: &Arc<dyn Storage>,
    ) -> Result<Option<&'static str>, StorageError> {
        Ok(None)
    }
}

#[async_trait]
impl FrameworkCheckpoint for ToyCheckpoint {
    fn stored(&self) -> Option<&Source> {
        None
    }

    fn damage(&self) -> &[String] {
        &[]
    }

    fn is_of_ranks(&self) -> bool {
        false
    }

    fn arguments(&self) -> Option<Dict> {
        None
    }

    fn shown_by(&self, _key: &str) -> Option<&'static str> {
        None
    }

    async fn describe(&self) -> Result<PluginReport, Error> {
        let files = self.source.metadata().await?.files().len();
        PluginReport::new("toy", ToyDescription { files })
    }

    async fn verify(&self, deep: bool, job: &JobOptions) -> Result<VerifyReport, Error> {
        Ok(dcp_jobs::verify::verify(&self.source, deep, job).await?)
    }

    async fn state_problem(
        &self,
        _uri: &str,
        _taken: Taken<'_>,
        _job: &JobOptions,
    ) -> Result<Option<String>, Error> {
        Ok(None)
    }
}

impl FrameworkOptions for ToyRanks {
    fn taken_by(&self) -> &'static str {
        "toy"
    }

    fn concern(&self) -> Concern {
        Concern::Target(TARGET)
    }

    fn subject(&self) -> &'static str {
        "the ranks of the toy"
    }

    fn given(&self) -> Option<&'static str> {
        Some("`ToyRanks`")
    }
}

#[async_trait]
impl FrameworkTarget for Toy {
    fn name(&self) -> &'static str {
        TARGET
    }

    fn description(&self) -> &'static str {
        "A directory of the toy, a file for each rank"
    }

    fn required_object(&self) -> Option<&'static str> {
        None
    }

    fn has_own_names(&self, _tensors: &CheckpointMetadata) -> bool {
        true
    }

    async fn layout(
        &self,
        source: &Checkpoint,
        options: &Options,
    ) -> Result<Box<dyn TargetLayout>, Error> {
        let of_source = source.source().metadata().await?.files().len();
        let of_source = u32::try_from(of_source.max(1)).unwrap_or(1);
        let ranks = options.get::<ToyRanks>().map_or(of_source, |chosen| chosen.0);
        Ok(Box::new(ToyRanks(ranks)))
    }
}

#[async_trait]
impl TargetLayout for ToyRanks {
    fn tensor_parallel(&self) -> u32 {
        1
    }

    fn divides(&self) -> Option<&'static str> {
        None
    }

    async fn write(
        &self,
        source: &Source,
        storage: Arc<dyn Storage>,
        request: TargetRequest<'_>,
    ) -> Result<ConversionReport, Error> {
        let writer = ToyWriter::new(storage, request.writer.overwrite);
        Ok(dcp_jobs::reshard::reshard(source, &writer, self.0, request.job).await?)
    }
}

#[async_trait]
impl RunLayout for Toy {
    fn naming(&self) -> StepNaming {
        StepNaming::Underscore
    }

    async fn note_latest(&self, storage: &dyn Storage, step: u64) -> Result<(), Error> {
        let tracker = Key::new(TRACKER).map_err(StorageError::from)?;
        storage.put(&tracker, step.to_string().into_bytes().into(), PutMode::Overwrite).await?;
        Ok(())
    }
}
