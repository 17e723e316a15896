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
            Error::new(ErrorKind::Damaged, format!("cannot read the adapter {place}: {error}"))
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
        let is_adapter = checkpoint.format().name == PeftFormat.info().name;
        let Some(options) = request.options.get::<AdapterOptions>() else {
            if is_adapter && request.format == Format::HuggingFace {
                let message = format!(
                    "{} is an adapter, which changes a base model and is none itself",
                    Quoted(checkpoint.place())
                );
                return Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint(format!("merge it into its base, with {SETTER}")));
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
        let (source, count) = Adapted::apply(&source, adapter, &config, request.job).await?;
        let count = counted(count as u64, "tensor");
        request.notes.say(format!("merging the adapter changes {count}"));
        Ok(source)
    }

    async fn refuse_state(
        &self,
        _sources: &[&Checkpoint],
        _taken: Taken<'_>,
        options: &Options,
        _job: &JobOptions,
    ) -> Result<(), Error> {
        match options.get::<AdapterOptions>() {
            None => Ok(()),
            Some(_) => {
                let message = format!("{SETTER} is for one base, and this is made of several");
                Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint("merge the adapter into its base first, by `Checkpoint::convert`"))
            }
        }
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
