//! The frameworks and mappings of an opener.

use std::fmt;
use std::sync::Arc;

use dcp_core::format::{FormatInfo, OpenedCheckpoint};
use dcp_core::{CheckpointMetadata, Storage, StorageError};
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::format::Format;
use crate::checkpoint::step_naming::StepNaming;
use crate::error::Error;
use crate::options::JobOptions;
use crate::source::Source;

use super::{
    Framework, FrameworkCheckpoint, FrameworkTarget, NameMapping, Options, Preparation, Taken,
};

/// The training frameworks and the mapping of names that jobs call.
#[derive(Clone, Default)]
pub struct Frameworks {
    frameworks: Vec<Arc<dyn Framework>>,
    mapping: Option<Arc<dyn NameMapping>>,
}

impl fmt::Debug for Frameworks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frameworks")
            .field("frameworks", &self.names())
            .field("mapping", &self.mapping)
            .finish()
    }
}

impl Frameworks {
    /// No framework: jobs on the formats alone.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Adds a framework; it replaces one of the same name.
    #[must_use]
    pub fn with(mut self, framework: Arc<dyn Framework>) -> Self {
        self.frameworks.retain(|there| there.name() != framework.name());
        self.frameworks.push(framework);
        self
    }

    /// Sets the mapping of names.
    #[must_use]
    pub fn with_mapping(mut self, mapping: Arc<dyn NameMapping>) -> Self {
        self.mapping = Some(mapping);
        self
    }

    /// The names of the frameworks, in the order in which they were added.
    #[must_use]
    pub fn names(&self) -> Vec<&'static str> {
        self.frameworks.iter().map(|framework| framework.name()).collect()
    }

    /// The targets of all frameworks, each with the name of its format.
    pub fn targets(&self) -> impl Iterator<Item = (&'static str, &dyn FrameworkTarget)> {
        self.frameworks.iter().filter_map(|one| Some((one.name(), one.target()?)))
    }

    /// The target of this name, or of the framework of this name, with the name of its format. What a format alone
    /// writes for equal ranks lacks what the framework needs, so the name of the format is one of the target, too.
    #[must_use]
    pub fn target(&self, name: &str) -> Option<(&'static str, &dyn FrameworkTarget)> {
        self.targets().find(|(format, target)| target.name() == name || *format == name)
    }

    /// The mapping of names.
    #[must_use]
    pub fn mapping(&self) -> Option<&dyn NameMapping> {
        self.mapping.as_deref()
    }

    /// Whether a framework or the mapping has this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        let mapping = self.mapping.as_ref().is_some_and(|mapping| mapping.name() == name);
        mapping || self.frameworks.iter().any(|framework| framework.name() == name)
    }

    /// The framework of a checkpoint that `format` opened, and the checkpoint.
    pub(crate) fn checkpoint(
        &self,
        format: FormatInfo,
        opened: &OpenedCheckpoint,
    ) -> Option<(Arc<dyn Framework>, Arc<dyn FrameworkCheckpoint>)> {
        let framework = self.frameworks.iter().find(|one| one.name() == format.name)?;
        Some((Arc::clone(framework), framework.checkpoint(opened)?))
    }

    /// The source of a job that writes, as all frameworks prepare it.
    pub(crate) async fn prepare(
        &self,
        checkpoint: &Checkpoint,
        request: &mut Preparation<'_>,
    ) -> Result<Source, Error> {
        let mut source = checkpoint.source.clone();
        for framework in &self.frameworks {
            source = framework.prepare(source, checkpoint, request).await?;
        }
        Ok(source)
    }

    /// Refuses state that must not become a part of something that is made of several checkpoints.
    pub(crate) async fn refuse_state(
        &self,
        sources: &[&Checkpoint],
        taken: Taken<'_>,
        format: Format,
        options: &Options,
        job: &JobOptions,
    ) -> Result<(), Error> {
        for framework in &self.frameworks {
            framework.refuse_state(sources, taken, format, options, job).await?;
        }
        Ok(())
    }

    /// Refuses a configuration of a model whose tensors have other names.
    pub(crate) fn refuse_other_names(
        &self,
        config: &Value,
        tensors: &CheckpointMetadata,
    ) -> Result<(), Error> {
        self.mapping.as_ref().map_or(Ok(()), |one| one.refuse_other_names(config, tensors))
    }

    /// Notes in the trackers of a run whose folders are named so that the checkpoint of `step` is the latest.
    pub(crate) async fn note_latest(
        &self,
        naming: StepNaming,
        storage: &dyn Storage,
        step: u64,
    ) -> Result<(), Error> {
        let runs = self.frameworks.iter().filter_map(|one| one.runs());
        for layout in runs.filter(|layout| layout.naming() == naming) {
            layout.note_latest(storage, step).await?;
        }
        Ok(())
    }

    /// Finds a checkpoint that is being replaced by another.
    pub(crate) async fn half_replaced(
        &self,
        storage: &Arc<dyn Storage>,
    ) -> Result<Option<&'static str>, StorageError> {
        for framework in &self.frameworks {
            if let Some(problem) = framework.half_replaced(storage).await? {
                return Ok(Some(problem));
            }
        }
        Ok(None)
    }
}
