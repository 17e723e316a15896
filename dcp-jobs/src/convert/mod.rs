//! Writing a checkpoint in another format.

pub(crate) mod destination;
mod model_folder;
pub(crate) mod safetensors_items;
mod to_hf;
mod to_safetensors;
pub(crate) mod to_torch_save;

use serde::Serialize;

use crate::checkpoint::chosen_keys::{Keys, unmatched_in};
use crate::checkpoint::format::Format;
use crate::checkpoint::framework::{Concern, Named, PluginReport, Preparation, Towards};
use crate::checkpoint::notes::Notes;
use crate::checkpoint::refuse_incomplete::refuse_incomplete;
use crate::checkpoint::setters::{destination_options, format_options, job_options};
use crate::checkpoint::whole::Whole;
use crate::checkpoint::{Checkpoint, model_files};
use crate::convert::destination::{Destination, SourceFacts};
use crate::error::{Error, ErrorKind};
use crate::keys::StatePart;
use crate::keys::select::Selection;
use crate::options::JobOptions;
use crate::place::same_place::same_sources;
use crate::view::{DequantizeOptions, Dequantized};
use crate::write::ConversionReport;

pub use safetensors_items::LEFT_OUT;
pub use to_hf::{to_hf, to_hf_with};
pub use to_safetensors::to_safetensors;
pub use to_torch_save::to_torch_save;

impl Checkpoint {
    /// Writes this checkpoint at `target`, in any format.
    ///
    /// ```
    /// # use dcp_jobs::Opener;
    /// # use dcp_core::registry::StorageRegistry;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mut storages = StorageRegistry::empty();
    /// # storages.register("file", |request| Ok(std::sync::Arc::new(dcp_storage_fs::FsStorage::open(&request.url)?)));
    /// # let url = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/pytorch/t21_plain");
    /// # let folder = tempfile::tempdir()?;
    /// # let target = folder.path().join("model.safetensors").display().to_string();
    /// let checkpoint = Opener::new(storages).open(url).await?;
    /// let written = checkpoint.convert(target).dtype(dcp_core::DType::BFloat16).run().await?;
    /// println!("{} tensors", written.report.tensors);
    /// # Ok(())
    /// # }
    /// ```
    pub fn convert(&self, target: impl Into<Destination>) -> Conversion<'_> {
        Conversion {
            checkpoint: self,
            destination: target.into(),
            keys: Keys::all(),
            job: JobOptions::default(),
            dequantize: None,
        }
    }
}

/// A conversion to [`run`](Self::run), from [`Checkpoint::convert`].
#[derive(Debug)]
#[must_use = "a conversion does nothing before `run`"]
pub struct Conversion<'a> {
    checkpoint: &'a Checkpoint,
    destination: Destination,
    keys: Keys,
    job: JobOptions,
    dequantize: Option<DequantizeOptions>,
}

/// The result of a job that writes.
#[derive(Debug, Serialize)]
#[non_exhaustive]
pub struct Written {
    /// The files and tensors that were written, or would be.
    #[serde(flatten)]
    pub report: ConversionReport,
    /// The report of the mapping between names, if one was applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapping: Option<PluginReport>,
    /// The notes of the job.
    #[serde(skip)]
    pub notes: Vec<String>,
}

impl Conversion<'_> {
    job_options!();
    destination_options!();
    format_options!();

    /// Makes quantized tensors plain numbers.
    pub fn dequantize(mut self, options: impl Into<Option<DequantizeOptions>>) -> Self {
        self.dequantize = options.into();
        self
    }

    /// Whether the result depends on other tensors than those that are written, because they are
    /// computed from several, or get their names by the family of the model.
    async fn reads_names_of_others(&self, format: Format) -> Result<bool, Error> {
        let options = self.destination.options();
        if self.dequantize.is_some() || options.given_of_optimizer().is_some() {
            return Ok(true);
        }
        let frameworks = &self.checkpoint.opener.frameworks;
        // Options about names and shapes may make a tensor of others.
        let mut given = options.given().map(|(options, _)| options.concern());
        if given.any(|concern| concern == Concern::Names) {
            return Ok(true);
        }
        if self.destination.framework_target(&self.checkpoint.opener, format).is_some() {
            return Ok(true);
        }
        match frameworks.mapping() {
            Some(mapping) => mapping.may_rename(self.checkpoint, format, options).await,
            None => Ok(false),
        }
    }

    /// Refuses options of an optimizer that is not written.
    fn refuse_optimizer_options(&self, selection: &Selection) -> Result<(), Error> {
        let option = self.destination.options().given_of_optimizer();
        let Some(option) = option else { return Ok(()) };
        if selection.part == StatePart::Everything {
            return Ok(());
        }
        let message = format!("{option} is for the optimizer, which is not written");
        let hint = "leave it out, or pass `StatePart::Everything`";
        Err(Error::new(ErrorKind::InvalidOption, message).with_hint(hint))
    }

    /// Converts the checkpoint. The target appears when it is complete.
    ///
    /// # Errors
    ///
    /// Every [`ErrorKind`]; after one the target is what it was before.
    pub async fn run(self) -> Result<Written, Error> {
        let format = self.destination.format()?;
        let selection = self.keys.selection(format.usual_part());
        self.destination.refuse_idle_options(&self.checkpoint.opener, true)?;
        self.refuse_optimizer_options(&selection)?;
        let mut notes = self.checkpoint.opener.notes();
        let checkpoint = match self.reads_names_of_others(format).await? {
            true => Whole::of(self.checkpoint).await?,
            false => Whole::of_keys(self.checkpoint, &selection.needed()).await?,
        };
        let (destination, job) = (&self.destination, &self.job);
        let work = destination.work("conversion", &checkpoint, job).await?;
        let work = work.option("keys", &selection);
        let work = work.option("`Conversion::dequantize`", &self.dequantize);
        same_sources(job, work, &[&checkpoint]).await?;
        destination.keep_apart(&checkpoint).await?;
        // The tensors alone of a save without its last file: a note says what they are.
        if checkpoint.unfinished.is_none() || format != Format::Safetensors {
            refuse_incomplete(&checkpoint, selection.part, job, &mut notes).await?;
        }
        let opener = &checkpoint.opener;
        let mut request = Preparation {
            options: destination.options(),
            selection: &selection,
            format,
            job,
            notes: &mut notes,
        };
        let source = opener.frameworks.prepare(&checkpoint, &mut request).await?;
        let source = match self.dequantize {
            Some(how) => Dequantized::apply(&source, how, job).await?,
            None => source,
        };
        let config = destination.config_folder();
        let layout = destination.layout(format, &checkpoint).await?;
        let towards = Towards {
            format,
            tensor_parallel: layout.as_ref().map_or(1, |layout| layout.tensor_parallel()),
            config,
            dtype: destination.cast_dtype(),
            options: destination.options(),
            job,
        };
        let named = match opener.frameworks.mapping() {
            Some(mapping) => mapping.apply(source, &checkpoint, towards, &mut notes).await?,
            None => {
                towards.refuse_idle_config()?;
                note_own_names(&checkpoint, format, &mut notes);
                Named::new(source)
            }
        };
        let source = named.source;
        if let Some(layout) = &layout {
            let is_named = named.report.is_some();
            destination
                .refuse_idle_sizes(format, &checkpoint, &**layout, is_named, &source)
                .await?;
        }
        let object = destination.required_object(format, opener, &source, &selection).await?;
        let mut files: Vec<_> = named.config.into_iter().collect();
        let unconfigured = match format {
            Format::HuggingFace if config.is_none() => {
                model_files::add_those_of(&checkpoint, &mut files, &mut notes).await?
            }
            _ => None,
        };
        if format == Format::HuggingFace && config.is_none() && named.report.is_none() {
            let tensors = source.metadata().await?;
            model_files::note_contradiction(opener, &files, &tensors, &mut notes);
        }
        if format != Format::HuggingFace && selection.part == StatePart::Everything {
            let left = model_files::trainer_files_of(&checkpoint).await?;
            if !left.is_empty() {
                notes.say(format!(
                    "not converting {}: the state of the trainer is no part of the model",
                    left.join(", ")
                ));
            }
        }
        let how = SourceFacts { files, layout, object };
        let unmatched = unmatched_in(&selection, [&source]).await?;
        let (source, not_taken) = self.keys.apply(&selection, &source, job, &mut notes).await?;
        let mut report = destination.write(&source, &checkpoint, how, job).await?;
        if let Some(note) = unconfigured {
            notes.say(note);
        }
        report.not_taken = not_taken;
        report.unmatched.splice(..0, unmatched);
        Ok(Written { report, mapping: named.report, notes: notes.into_said() })
    }
}

/// Notes that a model of a framework keeps the names of the framework, which transformers does not look for.
fn note_own_names(checkpoint: &Checkpoint, format: Format, notes: &mut Notes) {
    let Some(of) = checkpoint.framework.as_ref().filter(|_| format == Format::HuggingFace) else {
        return;
    };
    notes.say(format!(
        "the tensors keep the names of {}, which transformers does not load: no mapping of names is part of \
         this program",
        of.framework.title()
    ));
}
