//! Mappings between the names of programs.

use std::fmt;
use std::path::Path;

use async_trait::async_trait;
use dcp_core::{CheckpointMetadata, DType, Key};
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::format::Format;
use crate::checkpoint::notes::Notes;
use crate::error::{Error, ErrorKind};
use crate::options::JobOptions;
use crate::source::Source;

use super::{Options, PluginReport};

/// A mapping between the names and shapes that tensors have in two programs.
#[async_trait]
pub trait NameMapping: fmt::Debug + Send + Sync {
    /// Its name, as [`FrameworkOptions::taken_by`](super::FrameworkOptions::taken_by) has it.
    fn name(&self) -> &'static str;

    /// Whether tensors of `checkpoint` get other names on the way to a format.
    ///
    /// # Errors
    ///
    /// When the names cannot be read.
    async fn may_rename(
        &self,
        checkpoint: &Checkpoint,
        to: Format,
        options: &Options,
    ) -> Result<bool, Error>;

    /// Gives `source`, which is made of `checkpoint`, the names of the other side, if it goes there.
    ///
    /// # Errors
    ///
    /// [`Unmapped`](crate::ErrorKind::Unmapped) for tensors that the mapping does not have,
    /// [`Undecided`](crate::ErrorKind::Undecided) where the model may be several.
    async fn apply(
        &self,
        source: Source,
        checkpoint: &Checkpoint,
        towards: Towards<'_>,
        notes: &mut Notes,
    ) -> Result<Named, Error>;

    /// Refuses a configuration of a model whose tensors have names that a program does not look for: it would
    /// open the folder with random weights.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption), which names the first such tensor.
    fn refuse_other_names(&self, config: &Value, tensors: &CheckpointMetadata)
    -> Result<(), Error>;
}

/// The target of a mapping, as far as it decides about names.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Towards<'a> {
    /// The format that is written.
    pub format: Format,
    /// The number of ranks that share a matrix.
    pub tensor_parallel: u32,
    /// The folder with the configuration, where one was named.
    pub config: Option<&'a Path>,
    /// The dtype to which the weights are cast afterwards.
    pub dtype: Option<DType>,
    /// The options of the job.
    pub options: &'a Options,
    /// The job's use of the machine.
    pub job: &'a JobOptions,
}

impl Towards<'_> {
    /// Refuses a folder with a configuration that nothing reads: no mapping is applied, which would take the model
    /// from it.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption), but not for a model of Hugging Face, which gets its files.
    pub fn refuse_idle_config(&self) -> Result<(), Error> {
        refuse_idle_config(self.format, self.config)
    }
}

/// As [`Towards::refuse_idle_config`].
pub(crate) fn refuse_idle_config(format: Format, config: Option<&Path>) -> Result<(), Error> {
    if config.is_none() || format == Format::HuggingFace {
        return Ok(());
    }
    let message = "`Destination::config` is for a mapping, and none is applied";
    Err(Error::new(ErrorKind::InvalidOption, message)
        .with_hint("say `MappingOptions::arch`, or leave it out"))
}

/// The source of a job under the names that it gets.
#[derive(Debug)]
#[non_exhaustive]
pub struct Named {
    /// The source.
    pub source: Source,
    /// The file with the configuration of the model, where one was made.
    pub config: Option<(Key, Vec<u8>)>,
    /// The report of the mapping, where one was applied.
    pub report: Option<PluginReport>,
}

impl Named {
    /// A source under its names, without a configuration.
    #[must_use]
    pub fn new(source: Source) -> Self {
        Self { source, config: None, report: None }
    }

    /// Adds the report of the mapping that was applied.
    #[must_use]
    pub fn with_report(mut self, report: PluginReport) -> Self {
        self.report = Some(report);
        self
    }

    /// Adds the file with the configuration of the model.
    #[must_use]
    pub fn with_config(mut self, config: Option<(Key, Vec<u8>)>) -> Self {
        self.config = config;
        self
    }
}
