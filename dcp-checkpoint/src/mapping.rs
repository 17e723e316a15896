//! The mapping between names of Megatron-Core and of Hugging Face that a conversion applies.

use std::path::Path;
use std::sync::Arc;

use dcp_convert::cast::exact_tensors;
use dcp_convert::jobs::diff::DiffOptions;
use dcp_convert::read::read_object;
use dcp_convert::{JobOptions, Selection, Source};
use dcp_core::metadata::Entry;
use dcp_core::storage::StorageExt;
use dcp_core::{DType, Key, StorageError};
use dcp_mapping::{
    Facts, LayerSpec, MapOptions, Mapped, Mapping, MappingError, MappingReport, Padding,
    Recognition, Tying, map_to_hf, map_to_megatron, recognize, recognize_config,
};
use dcp_megatron::MegatronArgs;
use dcp_planner::KeyFilter;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, ErrorKind, Reasons};
use crate::format::Format;
use crate::mapping_options::{Architecture, MappingOptions};
use crate::model_files;
use crate::notes::Notes;
use crate::run_config;

/// The configuration of a Hugging Face model.
const CONFIG: &str = "config.json";
/// Bytes of a `config.json` that are read at most.
const CONFIG_MAX: u64 = 16 << 20;
/// The default of `make_vocab_size_divisible_by` in Megatron-LM.
const DIVISOR: u64 = 128;

/// The source of a conversion, under the names that it gets.
#[derive(Debug)]
pub(crate) struct Named {
    pub(crate) source: Source,
    pub(crate) config: Option<(Key, Vec<u8>)>,
    pub(crate) report: Option<MappingReport>,
}

/// The target of a mapping, as far as it decides about names.
#[derive(Debug)]
pub(crate) struct Towards<'a> {
    pub(crate) format: Format,
    /// The tensor parallel size.
    pub(crate) tp: u32,
    /// The folder with the configuration.
    pub(crate) config: Option<&'a Path>,
    /// The dtype to which the weights are cast afterwards.
    pub(crate) dtype: Option<DType>,
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
        if opened.megatron.is_some() {
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
        let storage = &*opened.storage;
        let config = Key::new(CONFIG).map_err(StorageError::from)?;
        Ok(match opened.is_model_folder() && storage.contains(&config).await? {
            true => Self::HuggingFace,
            false => Self::Other,
        })
    }
}

/// Whether tensors have names by which models of Megatron-Core request them: `decoder.layers.…`, one
/// tensor for all layers or one each, or those of the embedding, without a prefix.
pub(crate) async fn has_megatron_names(source: &Source) -> Result<bool, Error> {
    let metadata = source.metadata().await?;
    let roots = ["decoder.", "encoder.", "embedding.", "output_layer."];
    let is_tensor = |entry: &Entry| entry.as_tensor().is_some();
    Ok(metadata
        .iter()
        .any(|(name, entry)| is_tensor(entry) && roots.iter().any(|root| name.starts_with(root))))
}

/// The mapping that is applied.
enum Chosen {
    Auto,
    Of(Box<Mapping>),
}

impl MappingOptions {
    /// Whether tensors get other names on the way to a format.
    pub(crate) async fn may_rename(&self, opened: &Checkpoint, to: Format) -> Result<bool, Error> {
        let by_names = to == Format::HuggingFace
            && Origin::of(opened, &opened.source).await? == Origin::Megatron;
        Ok(self.arch.is_some() || by_names)
    }

    /// `source`, which was opened as `opened`, under the names of the other side, if it goes there.
    pub(crate) async fn apply(
        &self,
        source: Source,
        opened: &Checkpoint,
        towards: Towards<'_>,
        job: &JobOptions,
        notes: &mut Notes,
    ) -> Result<Named, Error> {
        let Towards { format: to, tp, config, dtype } = towards;
        let origin = Origin::of(opened, &source).await?;
        let Some(wanted) = self.wanted(opened, origin, to, notes)? else {
            self.refuse_idle()?;
            if to == Format::TorchDist && config.is_some() {
                let message = "--config is for a mapping, and none is applied";
                return Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint("say --arch, or leave it out"));
            }
            if to == Format::TorchDist
                && self.arch.is_none()
                && !has_megatron_names(&source).await?
            {
                let way = match origin {
                    Origin::Megatron => "convert to hf first, and from there to torch-dist",
                    _ => "--arch gives a Hugging Face model the names of Megatron-Core",
                };
                notes.say(format!(
                    "the tensors keep their names, which Megatron-LM does not load; {way}"
                ));
            }
            return Ok(Named { source, config: None, report: None });
        };
        if origin != Origin::Megatron {
            refuse_quantized(&source).await?;
        }
        let mut how = MapOptions::default();
        how.allow_left_over = self.allow_left_over;
        how.params_dtype = dtype;
        if self.untie {
            how.tying = Tying::Untie;
        }
        if self.layers == Some(LayerSpec::Local) {
            how.spec = LayerSpec::Local;
        }
        // From Hugging Face a mapping goes to Megatron-Core, or to the program that it is for.
        if to == Format::TorchDist || origin == Origin::HuggingFace {
            let config = config_of(opened, config).await?;
            let mapping = match wanted {
                Chosen::Auto => recognize_config(&config).map_err(|error| {
                    Error::from(error).with_hint(
                        "name one with --arch, or a TOML file of your own (`dcp arch llama` is \
                         one to begin with); --arch none keeps the names",
                    )
                })?,
                Chosen::Of(mapping) => {
                    if let Ok(own) = recognize_config(&config)
                        && own.name() != mapping.name()
                        && mapping.program().is_none()
                    {
                        notes.say(format!(
                            "{CONFIG} is of {own} and is read as one of {}, which --arch names; \
                             settings that only {own} has are not among the arguments",
                            mapping.name(),
                            own = own.name(),
                        ));
                    }
                    *mapping
                }
            };
            let divisor = self.vocab_divisor.unwrap_or(DIVISOR);
            let padding = Padding::Multiple { divisor, tensor_parallel: tp.into() };
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
                     ignores them as the configuration ties the two; --untie keeps them"
                )
            }));
            return Ok(Named { source: mapped.source, config: None, report: Some(mapped.report) });
        }
        for (given, option, does) in [
            (self.vocab_divisor.is_some(), "--make-vocab-divisible-by", "pads"),
            (self.layers.is_some(), "--transformer-impl", "chooses names"),
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
            return Err(Error::new(ErrorKind::Undecided, message)
                .with_hint("pass --config DIR, the folder with the config.json of the model"));
        }
        let mut facts = facts(opened, &source, notes).await?;
        let given = match config {
            Some(folder) => Some(config_of(opened, Some(folder)).await?),
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
                    "pass --config with the folder of this model, or correct its config.json",
                )
            })?;
        }
        how.ignore_arguments = self.ignore_args || config.is_some();
        let mapped = map_to_hf(&source, &mapping, &facts, &how, job).await;
        let mut mapped = mapped.map_err(|error| match (&error, mapping.program()) {
            (MappingError::BadFact { .. }, Some(_)) => {
                Error::from(error).with_kind(ErrorKind::InvalidOption).with_hint(
                    "pass --config with the folder of this model, or correct its config.json",
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
        Ok(Named { source: mapped.source, config, report: Some(mapped.report) })
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
            None if to == Format::TorchDist && origin == Origin::HuggingFace => {
                notes.say(
                    "it gets Megatron-Core's names, by config.json; --arch none keeps its own",
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
        if let Some(program) = program.filter(|_| to == Format::TorchDist || from_megatron) {
            let message = format!(
                "--arch goes to {program} or from there, and {} is Megatron-Core's",
                if from_megatron { format!("{:?}", opened.uri) } else { format!("--to {to}") }
            );
            return Err(Error::new(ErrorKind::InvalidOption, message)
                .with_hint("leave it out, or say --to hf or --to dcp"));
        }
        if from_megatron && to == Format::TorchDist {
            let message = format!(
                "--arch goes to Hugging Face or from there, and both {:?} and --to torch-dist are \
                 Megatron-Core's",
                opened.uri
            );
            return Err(Error::new(ErrorKind::InvalidOption, message).with_hint("leave it out"));
        }
        let stays = match program {
            None => to != Format::TorchDist,
            Some(_) => to == Format::HuggingFace,
        };
        if origin == Origin::HuggingFace && stays {
            let message = format!(
                "--arch goes to Megatron-Core or from there, and neither {:?} nor --to {to} is \
                 Megatron-Core's",
                opened.uri
            );
            return Err(Error::new(ErrorKind::InvalidOption, message)
                .with_hint("leave it out, or say --to torch-dist"));
        }
        Ok(Some(chosen))
    }

    /// Refuses options of a mapping where none is applied.
    fn refuse_idle(&self) -> Result<(), Error> {
        for (given, option) in [
            (self.vocab_divisor.is_some(), "--make-vocab-divisible-by"),
            (self.layers.is_some(), "--transformer-impl"),
            (self.allow_left_over, "--allow-left-over"),
            (self.ignore_args, "--ignore-args"),
            (self.untie, "--untie"),
        ] {
            if given {
                let message = format!("{option} is for a mapping, and none is applied");
                return Err(Error::new(ErrorKind::InvalidOption, message)
                    .with_hint("say --arch, or leave it out"));
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
    Err(Error::new(ErrorKind::Unsupported, message)
        .with_hint("--dequantize DTYPE makes plain numbers of the schemes that it reads; --arch none keeps all names"))
}

/// The facts in the arguments of a checkpoint. Those that were saved through PyTorch alone have them
/// as an object of their own.
/// What wrote no arguments wrote a configuration beside it.
async fn facts(opened: &Checkpoint, source: &Source, notes: &mut Notes) -> Result<Facts, Error> {
    let args = match &opened.megatron {
        Some(checkpoint) => checkpoint.args().map(|args| Facts::from_dict(args.dict())),
        None if has_args(source).await? => {
            let args = MegatronArgs::from_value(&read_object(source, "args").await?);
            args.map(|args| Facts::from_dict(args.dict()))
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
                "say which with --arch, or --arch none to keep Megatron-Core's names; {}",
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
                "name one with --arch, write a mapping of your own (`dcp arch llama > my.toml` \
                 shows how) and pass --arch my.toml, or keep Megatron-Core's names with --arch \
                 none; {}",
                families()
            )))
        }
        _ => Err(Error::new(ErrorKind::Undecided, "the family is not known").with_hint(families())),
    }
}

/// The configuration of a model of Hugging Face: of the folder that was named, or of the source.
async fn config_of(opened: &Checkpoint, folder: Option<&Path>) -> Result<serde_json::Value, Error> {
    let place = folder.map_or_else(|| opened.place.clone(), |folder| folder.display().to_string());
    let storage = match folder {
        Some(folder) => model_files::open_config(&opened.opener, folder).await?,
        None => Arc::clone(&opened.storage),
    };
    let key = Key::new(CONFIG).map_err(StorageError::from)?;
    if !storage.contains(&key).await? {
        let kind = if folder.is_some() { ErrorKind::InvalidOption } else { ErrorKind::Undecided };
        return Err(model_files::no_config(&place, kind));
    }
    let len = storage.stat(&key).await?.byte_len;
    if len > CONFIG_MAX {
        let message = format!("{CONFIG} has {len} bytes, more than a configuration has");
        return Err(Error::new(ErrorKind::Damaged, message));
    }
    let bytes = storage.read_range(&key, 0..len).await?;
    if let Some(folder) = folder {
        return model_files::parse_configuration(&bytes, folder).map(serde_json::Value::Object);
    }
    serde_json::from_slice(&bytes).map_err(|error| {
        let message = format!("cannot read {CONFIG} in {place:?}");
        Error::new(ErrorKind::Damaged, message).because(error)
    })
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
    let differs = !dcp_convert::diff(source, source, &options, &job).await?.equal;
    Ok(differs.then(|| (Arc::clone(output), Arc::clone(input))))
}

/// The configuration of the model that was made.
fn config_json(mapping: &Mapping, mapped: &mut Mapped) -> Result<(Key, Vec<u8>), Error> {
    let config = mapping.config_json(&mapped.facts).map_err(|error| {
        Error::from(error)
            .with_hint("pass --config DIR, the folder with the original model's config.json")
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
