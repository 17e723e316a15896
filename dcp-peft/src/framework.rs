//! PEFT as a framework that jobs call.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::format::{CheckpointFormat as _, OpenedCheckpoint};
use dcp_core::text::{Quoted, counted};
use dcp_core::{Storage, StorageError};
use dcp_jobs::framework::{
    Concern, Framework, FrameworkCheckpoint, FrameworkOptions, FrameworkTarget, Options,
    Preparation, RunLayout, Taken,
};
use dcp_jobs::{Checkpoint, Error, ErrorKind, Format, JobOptions, Source};

use serde_json::Value;

use crate::adapted::Adapted;
use crate::adapter_config::AdapterConfig;
use crate::format::{AdapterFacts, PeftFormat};

/// The name of the framework, and of the format of its checkpoints.
const NAME: &str = "peft";
/// The option, as messages name it.
const SETTER: &str = "`AdapterOptions`";

/// PEFT, as jobs call it: [`AdapterOptions`] merge an adapter into the checkpoint that is converted.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_jobs::framework::Frameworks;
/// use dcp_jobs::{Format, Opener};
/// use dcp_peft::{AdapterOptions, Peft, PeftFormat};
///
/// # async fn example(storages: dcp_core::registry::StorageRegistry) -> Result<(), dcp_jobs::Error> {
/// let opener = Opener::new(storages)
///     .formats(dcp_jobs::listing::formats().with(Arc::new(PeftFormat)))
///     .frameworks(Frameworks::none().with(Arc::new(Peft)));
/// let base = opener.open("llama").await?;
/// let adapter = AdapterOptions::new(opener.open("llama-lora").await?);
/// base.convert("merged").to(Format::HuggingFace).with(adapter).run().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Peft;

/// An adapter to merge into a base model.
pub struct AdapterOptions {
    adapter: Checkpoint,
}

impl AdapterOptions {
    /// Merges `adapter`, a checkpoint of [`PeftFormat`].
    #[must_use]
    pub fn new(adapter: Checkpoint) -> Self {
        Self { adapter }
    }

    /// The adapter.
    #[must_use]
    pub fn adapter(&self) -> &Checkpoint {
        &self.adapter
    }

    /// The configuration of the adapter.
    fn config(&self, facts: &AdapterFacts) -> Result<AdapterConfig, Error> {
        facts.config.as_ref().cloned().map_err(|error| {
            let place = Quoted(self.adapter.place());
            let message = format!("the adapter {place} cannot be merged: {}", error.problem());
            Error::new(ErrorKind::Unsupported, message)
                .with_hint("merge it with PEFT's merge_and_unload, and save the model")
        })
    }

    /// The facts that the format found, if this is an adapter.
    fn facts(&self) -> Result<Arc<AdapterFacts>, Error> {
        self.adapter.source().extension::<AdapterFacts>().ok_or_else(|| {
            let (place, title) = (Quoted(self.adapter.place()), self.adapter.format().title);
            let message = format!("{place} is a checkpoint of {title}, and not an adapter of PEFT");
            Error::new(ErrorKind::InvalidOption, message).with_hint(
                "an adapter is a folder with adapter_config.json and adapter_model.safetensors",
            )
        })
    }
}

/// The ranks of a group compare it.
impl fmt::Debug for AdapterOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.adapter.source().extension::<AdapterFacts>();
        f.debug_struct("AdapterOptions")
            .field("adapter", &self.adapter.place())
            .field("config", &config)
            .finish()
    }
}

impl FrameworkOptions for AdapterOptions {
    fn taken_by(&self) -> &'static str {
        NAME
    }

    fn concern(&self) -> Concern {
        Concern::Names
    }

    fn subject(&self) -> &'static str {
        SETTER
    }

    fn given(&self) -> Option<&'static str> {
        Some(SETTER)
    }

    fn sources(&self) -> Vec<&Checkpoint> {
        vec![&self.adapter]
    }
}

/// Whether a checkpoint is an adapter.
fn is_adapter(checkpoint: &Checkpoint) -> bool {
    checkpoint.format().name == PeftFormat.info().name
}

/// The refusal to write an adapter as a model.
fn no_model(adapter: &Checkpoint) -> Error {
    let place = Quoted(adapter.place());
    let message = format!("{place} is an adapter, which changes a base model and is none itself");
    Error::new(ErrorKind::InvalidOption, message)
        .with_hint(format!("merge it into its base, with {SETTER}"))
}

/// Whether the configuration beside a base says that its head is its embedding; `None` where it says nothing.
async fn stated_tie(base: &Checkpoint) -> Result<Option<bool>, Error> {
    match base.model_config(None).await {
        Ok(config) => Ok(config.get("tie_word_embeddings").and_then(Value::as_bool)),
        Err(error) if error.kind() == ErrorKind::Undecided => Ok(None),
        Err(error) => Err(error),
    }
}

#[async_trait]
impl Framework for Peft {
    fn name(&self) -> &'static str {
        NAME
    }

    fn title(&self) -> &'static str {
        "PEFT"
    }

    /// An adapter is read as the file of tensors that it is.
    fn checkpoint(&self, _opened: &OpenedCheckpoint) -> Option<Arc<dyn FrameworkCheckpoint>> {
        None
    }

    /// Merges the adapter of the options, if there is one.
    async fn prepare(
        &self,
        source: Source,
        checkpoint: &Checkpoint,
        request: &mut Preparation<'_>,
    ) -> Result<Source, Error> {
        let is_adapter = is_adapter(checkpoint);
        let Some(options) = request.options.get::<AdapterOptions>() else {
            if is_adapter && request.format == Format::HuggingFace {
                return Err(no_model(checkpoint));
            }
            return Ok(source);
        };
        if is_adapter {
            let message = format!("{} is an adapter itself", Quoted(checkpoint.place()));
            return Err(Error::new(ErrorKind::InvalidOption, message)
                .with_hint("the base comes first, then its adapter"));
        }
        let config = options.config(&*options.facts()?)?;
        let adapter = options.adapter.source();
        let (source, merged) =
            Adapted::apply(&source, adapter, &config, stated_tie(checkpoint).await?, request.job)
                .await?;
        let count = counted(merged.changed as u64, "tensor");
        request.notes.say(format!("merging the adapter changes {count}"));
        merged.notes.into_iter().for_each(|note| request.notes.say(note));
        Ok(source)
    }

    /// Adapters of one base may be averaged; beside other checkpoints, or as a model, their tensors mean nothing.
    async fn refuse_state(
        &self,
        sources: &[&Checkpoint],
        _taken: Taken<'_>,
        format: Format,
        options: &Options,
        _job: &JobOptions,
    ) -> Result<(), Error> {
        if options.get::<AdapterOptions>().is_some() {
            let message = format!("{SETTER} is for one base, and this is made of several");
            return Err(Error::new(ErrorKind::InvalidOption, message)
                .with_hint("merge the adapter into its base first, by `Checkpoint::convert`"));
        }
        let Some(adapter) = sources.iter().find(|source| is_adapter(source)) else {
            return Ok(());
        };
        let is_other = |source: &&Checkpoint| !is_adapter(source);
        if format == Format::HuggingFace || sources.iter().copied().any(|one| is_other(&one)) {
            return Err(no_model(adapter));
        }
        Ok(())
    }

    /// PEFT writes adapters.
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
