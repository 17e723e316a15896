//! The mapping between names of Megatron-Core and of Hugging Face that a conversion applies.

mod family_tensors;
mod job_error;
mod options;
mod other_names;
mod run_config;
mod stated_sizes;

use std::sync::Arc;

use async_trait::async_trait;
use dcp_core::metadata::Entry;
use dcp_core::storage::StorageExt;
use dcp_core::{CheckpointMetadata, Key, StorageError};
use dcp_jobs::cast::exact_tensors;
use dcp_jobs::diff::DiffOptions;
use dcp_jobs::framework::{NameMapping, Named, Options, PluginReport, Towards};
use dcp_jobs::read::read_object;
use dcp_jobs::{
    Checkpoint, Error, ErrorKind, Format, JobOptions, Notes, Reasons, Selection, Source,
};
use dcp_planner::KeyFilter;

use crate::error::MappingError;
use crate::facts::{Facts, Padding};
use crate::map::options::{LayerSpec, MapOptions, Tying};
use crate::map::{Mapped, MappingReport, map_to_hf, map_to_megatron};
use crate::mapping::Mapping;
use crate::recognize::{Recognition, recognize, recognize_config};

pub use options::{Architecture, MappingOptions};
use other_names::refuse_other_names;

/// The name of the mapping and of its report.
const NAME: &str = "mapping";
/// The framework whose names are mapped to those of Hugging Face.
const MEGATRON: &str = "megatron";
/// The target whose tensors get names of Megatron-Core.
const TORCH_DIST: Format = Format::Registered("torch-dist");
/// The configuration of a Hugging Face model.
const CONFIG: &str = "config.json";
/// The default of `make_vocab_size_divisible_by` in Megatron-LM.
const DIVISOR: u64 = 128;

/// The built-in mapping between the names of Megatron-Core or torchtitan and those of Hugging Face;
/// [`MappingOptions`] are its options.
#[derive(Clone, Copy, Debug, Default)]
pub struct FamilyMapping;

#[async_trait]
impl NameMapping for FamilyMapping {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn may_rename(
        &self,
        checkpoint: &Checkpoint,
        to: Format,
        options: &Options,
    ) -> Result<bool, Error> {
        let usual = MappingOptions::default();
        let options = options.get::<MappingOptions>().unwrap_or(&usual);
        options.may_rename(checkpoint, to).await
    }

    async fn apply(
        &self,
        source: Source,
        checkpoint: &Checkpoint,
        towards: Towards<'_>,
        notes: &mut Notes,
    ) -> Result<Named, Error> {
        let usual = MappingOptions::default();
        let options = towards.options.get::<MappingOptions>().unwrap_or(&usual);
        options.apply(source, checkpoint, towards, notes).await
    }

    fn refuse_other_names(
        &self,
        config: &serde_json::Value,
        tensors: &CheckpointMetadata,
    ) -> Result<(), Error> {
        refuse_other_names(config, tensors)
    }
}

/// Whose names a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Megatron,
    /// Names of a Hugging Face folder with a `config.json`.
    HuggingFace,
    /// Any.
    Other,
}

impl Origin {
    async fn of(opened: &Checkpoint, source: &Source) -> Result<Self, Error> {
        if opened.framework() == Some(MEGATRON) {
            return Ok(Self::Megatron);
        }
        // Layers of a decoder are called so elsewhere, too, but not what is in them.
        let is_layer = |name: &str| {
            let layer = name.split_once("decoder.layers.").map(|(_, rest)| rest);
            layer.is_some_and(|rest| rest.contains("self_attention.linear_"))
        };
        if source.names().await?.iter().any(|(name, _)| is_layer(name)) {
            return Ok(Self::Megatron);
        }
        let storage = &**opened.storage();
        let config = Key::new(CONFIG).map_err(StorageError::from)?;
        Ok(match opened.is_model_folder() && storage.contains(&config).await? {
            true => Self::HuggingFace,
            false => Self::Other,
        })
    }
}

/// The mapping that is applied.
enum Chosen {
    Auto,
    Of(Box<Mapping>),
}

impl MappingOptions {
    /// Whether tensors get other names on the way to a format.
    async fn may_rename(&self, opened: &Checkpoint, to: Format) -> Result<bool, Error> {
        let by_names = to == Format::HuggingFace
            && Origin::of(opened, opened.source()).await? == Origin::Megatron;
        Ok(self.arch.is_some() || by_names)
    }

    /// `source`, which was opened as `opened`, under the names of the other side, if it goes there.
    async fn apply(
        &self,
        source: Source,
        opened: &Checkpoint,
        towards: Towards<'_>,
        notes: &mut Notes,
    ) -> Result<Named, Error> {
        let Towards { format: to, tensor_parallel, config, dtype, job, .. } = towards;
        let origin = Origin::of(opened, &source).await?;
        let Some(wanted) = self.wanted(opened, origin, to, notes)? else {
            self.refuse_idle()?;
            towards.refuse_idle_config()?;
            let target = opened.opener().framework_target(to).filter(|_| to == TORCH_DIST);
            if let Some(target) = target
                && self.arch.is_none()
                && !target.has_own_names(&*source.metadata().await?)
            {
                let way = match origin {
                    Origin::Megatron => "convert to hf first, and from there to torch-dist",
                    _ => {
                        "`MappingOptions::arch` gives a Hugging Face model the names of Megatron-Core"
                    }
                };
                notes.say(format!(
                    "the tensors keep their names, which Megatron-LM does not load; {way}"
                ));
            }
            return Ok(Named::new(source));
        };
        if origin != Origin::Megatron {
            refuse_quantized(&source).await?;
        }
        let mut how = MapOptions {
            allow_left_over: self.allow_left_over,
            params_dtype: dtype,
            ..MapOptions::default()
        };
        if self.untie {
            how.tying = Tying::Untie;
        }
        if self.layers == Some(LayerSpec::Local) {
            how.spec = LayerSpec::Local;
        }
        // From Hugging Face a mapping goes to Megatron-Core, or to the program that it is for.
        if to == TORCH_DIST || origin == Origin::HuggingFace {
            let config = opened.model_config(config).await?;
            let mapping = match wanted {
                Chosen::Auto => recognize_config(&config).map_err(|error| {
                    Error::from(error).with_hint(
                        "name one with `MappingOptions::arch`, or a TOML file of your own \
                         (`Mapping::declaration` is one to begin with); `Architecture::Keep` \
                         keeps the names",
                    )
                })?,
                Chosen::Of(mapping) => {
                    if let Ok(own) = recognize_config(&config)
                        && own.name() != mapping.name()
                        && mapping.program().is_none()
                    {
                        notes.say(format!(
                            "{CONFIG} is of {own} and is read as one of {}, which \
                             `MappingOptions::arch` names; settings that only {own} has are not \
                             among the arguments",
                            mapping.name(),
                            own = own.name(),
                        ));
                    }
                    *mapping
                }
            };
            let divisor = self.vocab_divisor.unwrap_or(DIVISOR);
            let padding = Padding::Multiple { divisor, tensor_parallel: tensor_parallel.into() };
            let (facts, notes) = mapping.read_config(&config, self.ignore_args)?;
            let facts = facts.with_padding(padding);
            let mut mapped = map_to_megatron(&source, &mapping, &facts, &how, job).await?;
            mapped.report.notes.splice(..0, notes);
            // Only a note: rank 0 of a group compares them.
            let alone = job.of_coordinator();
            let differs = untaken_that_differs(&mapped.report, &source, alone).await?;
            mapped.report.notes.extend(differs.map(|(output, input)| {
                format!(
                    "{output:?}, which is left out, has other values than {input:?}: transformers \
                     ignores them as the configuration ties the two; `MappingOptions::untie` keeps them"
                )
            }));
            return Ok(Named::new(mapped.source).with_report(report(mapped.report)?));
        }
        for (given, option, does) in [
            (self.vocab_divisor.is_some(), "`MappingOptions::vocab_divisor`", "pads"),
            (self.layers.is_some(), "`MappingOptions::layers`", "chooses names"),
        ] {
            if given {
                let message = format!("{option} {does} for Megatron-Core, and this goes from it");
                return Err(Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out"));
            }
        }
        if let (Chosen::Of(mapping), None) = (&wanted, config)
            && let Some(program) = mapping.program()
        {
            let message = format!("a model of {program} says nothing about its heads");
            return Err(Error::new(ErrorKind::Undecided, message).with_hint(
                "pass `Destination::config`, the folder with the config.json of the model",
            ));
        }
        let mut facts = facts(opened, &source, notes).await?;
        let given = match config {
            Some(folder) => Some(opened.model_config(Some(folder)).await?),
            None => None,
        };
        let mapping = match (wanted, given.as_ref().map(recognize_config)) {
            (Chosen::Of(mapping), _) => *mapping,
            (Chosen::Auto, Some(Ok(mapping))) => mapping,
            (Chosen::Auto, _) => recognized(&source, &facts).await?,
        };
        if let Some(config) = &given {
            // The model is opened with it, so that is how many tokens there are.
            let described = mapping.read_config(config, true);
            let described = described.and_then(|(stated, _)| facts.described_by(&stated));
            facts = described.map_err(|error| {
                // The folder that was named is wrong, not the checkpoint.
                Error::from(error).with_kind(ErrorKind::InvalidOption).with_hint(
                    "pass `Destination::config` with the folder of this model, or correct its config.json",
                )
            })?;
        }
        how.ignore_arguments = self.ignore_args || config.is_some();
        let mapped = map_to_hf(&source, &mapping, &facts, &how, job).await;
        let mut mapped = mapped.map_err(|error| match (&error, mapping.program()) {
            (MappingError::BadFact { .. }, Some(_)) => {
                Error::from(error).with_kind(ErrorKind::InvalidOption).with_hint(
                    "pass `Destination::config` with the folder of this model, or correct its config.json",
                )
            }
            _ => error.into(),
        })?;
        // Every rank of a group has to fail.
        let alone = Some(job.of_one_rank());
        if let Some((output, input)) = untaken_that_differs(&mapped.report, &source, alone).await? {
            let message = format!(
                "config.json has tie_word_embeddings true, and {output:?} has other values than \
                 {input:?}: transformers would ignore them"
            );
            return Err(Error::new(ErrorKind::InvalidOption, message)
                .with_hint("correct tie_word_embeddings in config.json"));
        }
        let config = match (to, config) {
            (Format::HuggingFace, None) => Some(config_json(&mapping, &mut mapped)?),
            _ => None,
        };
        Ok(Named::new(mapped.source).with_report(report(mapped.report)?).with_config(config))
    }

    /// The mapping that is applied, if one is.
    fn wanted(
        &self,
        opened: &Checkpoint,
        origin: Origin,
        to: Format,
        notes: &mut Notes,
    ) -> Result<Option<Chosen>, Error> {
        let from_megatron = origin == Origin::Megatron;
        let arch = match &self.arch {
            None if from_megatron && to == Format::HuggingFace => &Architecture::Auto,
            None if to == TORCH_DIST && origin == Origin::HuggingFace => {
                notes.say(
                    "it gets Megatron-Core's names, by config.json; `Architecture::Keep` keeps its own",
                );
                &Architecture::Auto
            }
            None => return Ok(None),
            Some(arch) => arch,
        };
        let chosen = match arch {
            Architecture::Keep => return Ok(None),
            Architecture::Auto => Chosen::Auto,
            Architecture::Of(mapping) => Chosen::Of(mapping.clone()),
        };
        let program = match &chosen {
            Chosen::Of(mapping) => mapping.program(),
            Chosen::Auto => None,
        };
        if let Some(program) = program.filter(|_| to == TORCH_DIST || from_megatron) {
            let message = format!(
                "`MappingOptions::arch` goes to {program} or from there, and {} is Megatron-Core's",
                if from_megatron {
                    format!("{:?}", opened.uri())
                } else {
                    format!("`Destination::to` {to}")
                }
            );
            return Err(Error::new(ErrorKind::InvalidOption, message)
                .with_hint("leave it out, or say `Destination::to` hf or `Destination::to` dcp"));
        }
        if from_megatron && to == TORCH_DIST {
            let message = format!(
                "`MappingOptions::arch` goes to Hugging Face or from there, and both {:?} and \
                 `Destination::to` torch-dist are Megatron-Core's",
                opened.uri()
            );
            return Err(Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out"));
        }
        let stays = match program {
            None => to != TORCH_DIST,
            Some(_) => to == Format::HuggingFace,
        };
        if origin == Origin::HuggingFace && stays {
            let message = format!(
                "`MappingOptions::arch` goes to Megatron-Core or from there, and neither {:?} \
                 nor `Destination::to` {to} is Megatron-Core's",
                opened.uri()
            );
            return Err(Error::new(ErrorKind::InvalidOption, message)
                .with_hint("leave it out, or say `Destination::to` torch-dist"));
        }
        Ok(Some(chosen))
    }

    /// Refuses options of a mapping where none is applied.
    fn refuse_idle(&self) -> Result<(), Error> {
        for (given, option) in [
            (self.vocab_divisor.is_some(), "`MappingOptions::vocab_divisor`"),
            (self.layers.is_some(), "`MappingOptions::layers`"),
            (self.allow_left_over, "`MappingOptions::allow_left_over`"),
            (self.ignore_args, "`MappingOptions::ignore_args`"),
            (self.untie, "`MappingOptions::untie`"),
        ] {
            if given {
                let message = format!("{option} is for a mapping, and none is applied");
                return Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint("say `MappingOptions::arch`, or leave it out"));
            }
        }
        Ok(())
    }
}

/// Refuses weights that mean nothing without scales, which no mapping takes along.
async fn refuse_quantized(source: &Source) -> Result<(), Error> {
    let exact = exact_tensors(&*source.metadata().await?);
    let Some(scales) = exact.scales() else { return Ok(()) };
    let message =
        format!("the model is quantized: {scales:?} has scales, which a mapping leaves out");
    Err(Error::new(ErrorKind::Unsupported, message).with_hint(
        "`Conversion::dequantize` makes plain numbers of the schemes that it reads; \
                    `Architecture::Keep` keeps all names",
    ))
}

/// The report of the mapping as a plug-in's.
fn report(report: MappingReport) -> Result<PluginReport, Error> {
    PluginReport::new(NAME, report)
}

/// The facts in the arguments of a checkpoint. Those that were saved through PyTorch alone have them
/// as an object of their own.
/// What wrote no arguments wrote a configuration beside it.
async fn facts(opened: &Checkpoint, source: &Source, notes: &mut Notes) -> Result<Facts, Error> {
    let args = match opened.of_framework() {
        Some(of) => of.arguments().map(|args| Facts::from_dict(&args)),
        None if has_args(source).await? => {
            let args = read_object(source, "args").await?;
            args.attributes().map(Facts::from_dict)
        }
        None => None,
    };
    if let Some(facts) = args {
        return Ok(facts);
    }
    let Some((facts, file)) = run_config::facts(opened).await? else { return Ok(Facts::new()) };
    notes.say(format!("the checkpoint has no arguments; {file} describes the model"));
    Ok(facts)
}

/// Whether there are arguments of Megatron as an object of their own.
async fn has_args(source: &Source) -> Result<bool, Error> {
    let is_object = |entry: &Entry| matches!(entry, Entry::Object(_));
    Ok(source.metadata().await?.get("args").is_some_and(is_object))
}

/// The family of a Megatron checkpoint.
async fn recognized(source: &Source, facts: &Facts) -> Result<Mapping, Error> {
    let families = || format!("families: {}", Mapping::families().join(", "));
    match recognize(&*source.metadata().await?, facts)? {
        Recognition::Found { family, .. } => Ok(Mapping::builtin(&family)?),
        Recognition::Ambiguous { candidates, why } => {
            let message = format!(
                "the model may be of several families, {}, by its weights: {why}",
                candidates.join(" or ")
            );
            Err(Error::new(ErrorKind::Undecided, message).with_hint(format!(
                "say which with `MappingOptions::arch`, or `Architecture::Keep` to keep \
                 Megatron-Core's names; {}",
                families()
            )))
        }
        Recognition::Unknown { why } => {
            let why: Vec<_> = why.iter().map(|(name, what)| format!("{name}: {what}")).collect();
            let message = "the model is of no family that is known here".to_owned();
            let error = Error::new(ErrorKind::Undecided, message);
            let error = match Reasons::new(why) {
                Some(reasons) => error.because(reasons),
                None => error,
            };
            Err(error.with_hint(format!(
                "name one with `MappingOptions::arch`, write a mapping of your own (`Mapping::declaration` \
                 shows how) and pass it to `MappingOptions::arch`, or keep Megatron-Core's names with \
                 `Architecture::Keep`; {}",
                families()
            )))
        }
    }
}

/// An output embedding that is not taken and differs from the input embedding to which the configuration
/// ties it, and that one.
async fn untaken_that_differs(
    report: &MappingReport,
    source: &Source,
    job: Option<JobOptions>,
) -> Result<Option<(Arc<str>, Arc<str>)>, Error> {
    let (Some((output, input)), Some(job)) = (&report.untaken, job) else {
        return Ok(None);
    };
    let only = |fqn: &Arc<str>| {
        let mut selection = Selection::all();
        selection.include = KeyFilter::any_of([&**fqn]);
        selection.with_mapping([(fqn.to_string(), Some("embedding".to_owned()))].into())
    };
    let mut options = DiffOptions::default();
    (options.a, options.b) = (only(output), only(input));
    let differs = !dcp_jobs::diff::diff(source, source, &options, &job).await?.equal;
    Ok(differs.then(|| (Arc::clone(output), Arc::clone(input))))
}

/// The configuration of the model that was made.
fn config_json(mapping: &Mapping, mapped: &mut Mapped) -> Result<(Key, Vec<u8>), Error> {
    let config = mapping.config_json(&mapped.facts).map_err(|error| {
        Error::from(error).with_hint(
            "pass `Destination::config`, the folder with the original model's config.json",
        )
    })?;
    let is_open = |token| config.get(token).is_none_or(serde_json::Value::is_null);
    if ["bos_token_id", "eos_token_id"].into_iter().all(is_open) {
        let note = "config.json leaves bos_token_id and eos_token_id open: the tokenizer decides";
        mapped.report.notes.push(note.to_owned());
    }
    let mut text = serde_json::to_vec_pretty(&config).map_err(|error| {
        Error::new(ErrorKind::Io, format!("cannot write {CONFIG}")).because(error)
    })?;
    text.push(b'\n');
    Ok((Key::new("config.json").map_err(StorageError::from)?, text))
}
