//! Checkpoints of a framework as targets.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::WriterOptions;
use dcp_core::{CheckpointMetadata, Storage, Value};

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::options::JobOptions;
use crate::source::Source;
use crate::write::ConversionReport;

use super::Options;

/// Checkpoints of a framework as a target of conversions, which are divided by rules of its own and not
/// among equal ranks.
#[async_trait]
pub trait FrameworkTarget: fmt::Debug + Send + Sync {
    /// Its name, as [`Format::Registered`](crate::Format::Registered) has it.
    fn name(&self) -> &'static str;

    /// Describes what is written, in a line.
    fn description(&self) -> &'static str;

    /// The key of an object without which the framework loads no checkpoint. It is written whatever keys are
    /// chosen, unless they exclude it.
    fn required_object(&self) -> Option<&'static str>;

    /// Whether tensors have names by which models of the framework request them.
    fn has_own_names(&self, tensors: &CheckpointMetadata) -> bool;

    /// Decides how `source` is divided, by the options and, where they say nothing, by its own layout.
    ///
    /// # Errors
    ///
    /// When the layout of `source` cannot be read.
    async fn layout(
        &self,
        source: &Checkpoint,
        options: &Options,
    ) -> Result<Box<dyn TargetLayout>, Error>;
}

/// A division of a checkpoint of a framework, and its writing. The ranks of a group compare its `Debug`, so that
/// has all that decides about the bytes.
#[async_trait]
pub trait TargetLayout: fmt::Debug + Send + Sync {
    /// The number of ranks that share a matrix, by which vocabularies are padded.
    fn tensor_parallel(&self) -> u32;

    /// The first of the options that divides tensors of the framework, by its setter in backticks. It
    /// means nothing for tensors of another program.
    fn divides(&self) -> Option<&'static str>;

    /// Writes `source` to a folder.
    ///
    /// # Errors
    ///
    /// When the layout does not fit the tensors, and those of the source and of the storage.
    async fn write(
        &self,
        source: &Source,
        storage: Arc<dyn Storage>,
        request: TargetRequest<'_>,
    ) -> Result<ConversionReport, Error>;
}

/// A request to write a target.
#[derive(Debug)]
#[non_exhaustive]
pub struct TargetRequest<'a> {
    /// The [object](FrameworkTarget::required_object) that the framework needs, where the chosen keys leave it
    /// out.
    pub object: Option<Value>,
    /// Whether a checkpoint is replaced, and how data is compressed.
    pub writer: &'a WriterOptions,
    /// The job's use of the machine.
    pub job: &'a JobOptions,
}
