//! The mapping between names of Megatron-Core and of Hugging Face that a conversion goes by.

use std::io;
use std::path::Path;

use clap::{Args, ValueEnum};
use dcp::convert::{JobOptions, Source, read_object};
use dcp::core::{DType, Entry, Key, StorageError, StorageExt};
use dcp::mapping::{
    Facts, LayerSpec, MapOptions, Mapped, Mapping, MappingReport, Padding, Recognition, Tying,
    map_to_hf, map_to_megatron, recognize, recognize_config,
};
use dcp::megatron::MegatronArgs;

use crate::destination::Format;
use crate::failure::{Exit, Failure};
use crate::folder::is_dcp;
use crate::open::Opened;
use crate::output::Output;
use crate::sidecar_config;
use crate::small_file::read_at_most;
use crate::style::count;
use crate::summary::list;

/// What tells a model of Hugging Face.
const CONFIG: &str = "config.json";
/// Bytes of a `config.json` that are read at most.
const CONFIG_MAX: u64 = 16 << 20;
/// Bytes of a mapping that are read at most.
const MAPPING_MAX: u64 = 16 << 20;
/// What `make_vocab_size_divisible_by` is for Megatron-LM.
const DIVISOR: u64 = 128;

/// Which mapping is applied, and how.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Megatron-Core and Hugging Face")]
pub(crate) struct Arch {
    /// Go from Megatron-Core's weights to Hugging Face's, or the other way with --to torch-dist:
    /// a family of models (`dcp arch` lists them), a TOML file of your own, auto to recognize it,
    /// or none to keep names and shapes. It is auto from Megatron-Core to hf, and from a Hugging
    /// Face folder with a config.json to torch-dist.
    #[arg(long, value_name = "FAMILY|FILE")]
    arch: Option<String>,

    /// Pad the vocabulary to a multiple of this times --tp; 128 by default, as Megatron-LM has it.
    #[arg(
        long,
        value_name = "N",
        alias = "make-vocab-size-divisible-by",
        value_parser = clap::value_parser!(u64).range(1..=1 << 32)
    )]
    make_vocab_divisible_by: Option<u64>,

    /// The layers that are to load what is written, which have other names for norms:
    /// transformer_engine by default, as Megatron-LM has it.
    #[arg(long, value_name = "IMPL")]
    transformer_impl: Option<TransformerImpl>,

    /// Leave out tensors that the mapping has no rule for instead of refusing them.
    #[arg(long)]
    allow_left_over: bool,

    /// Go on where the arguments or config.json say what the other side cannot do, and say so: the
    /// model made computes something else. To hf, --config DIR has it so too.
    #[arg(long)]
    ignore_args: bool,

    /// Write an output embedding also where the model has none of its own, as a copy of the input
    /// embedding.
    #[arg(long)]
    untie: bool,
}

/// An implementation of layers in Megatron-Core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum TransformerImpl {
    /// Those of Transformer Engine.
    TransformerEngine,
    /// Megatron-Core's own.
    Local,
}

/// What is converted, under the names that it gets.
pub(crate) struct Named {
    pub(crate) source: Source,
    pub(crate) config: Option<(Key, Vec<u8>)>,
    pub(crate) report: Option<MappingReport>,
}

/// Where it goes.
pub(crate) struct Towards<'a> {
    pub(crate) format: Format,
    /// The tensor parallel size.
    pub(crate) tp: u32,
    /// The folder with the configuration.
    pub(crate) config: Option<&'a Path>,
    /// What the weights are cast to afterwards.
    pub(crate) dtype: Option<DType>,
}

/// Whose names a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Megatron,
    /// Those of a Hugging Face folder with a `config.json`.
    HuggingFace,
    /// Any.
    Other,
}

impl Origin {
    async fn of(opened: &Opened, source: &Source) -> Result<Self, Failure> {
        if opened.megatron.is_some() {
            return Ok(Self::Megatron);
        }
        // Layers of a decoder are called so elsewhere, too, but not what is in them.
        let is_layer = |name: &str| {
            let layer = name.split_once("decoder.layers.").map(|(_, rest)| rest);
            layer.is_some_and(|rest| rest.contains("self_attention.linear_"))
        };
        if source.metadata().await?.iter().any(|(name, _)| is_layer(name)) {
            return Ok(Self::Megatron);
        }
        let storage = &*opened.folder;
        let is_folder = !Path::new(&opened.place).is_file() && !is_dcp(storage).await?;
        let config = Key::new(CONFIG).map_err(StorageError::from)?;
        Ok(match is_folder && storage.contains(&config).await? {
            true => Self::HuggingFace,
            false => Self::Other,
        })
    }
}

/// Whether tensors have names by which models of Megatron-Core ask for them: `decoder.layers.…`, one
/// tensor for all layers or one each, or those of the embedding, without a prefix.
async fn has_megatron_names(source: &Source) -> Result<bool, Failure> {
    let metadata = source.metadata().await?;
    let roots = ["decoder.", "encoder.", "embedding.", "output_layer."];
    let is_tensor = |entry: &Entry| entry.as_tensor().is_some();
    Ok(metadata
        .iter()
        .any(|(name, entry)| is_tensor(entry) && roots.iter().any(|root| name.starts_with(root))))
}

/// What was asked for.
enum Wanted {
    Auto,
    Of(Box<Mapping>),
}

impl Arch {
    /// `source`, which was opened as `opened`, under the names of the other side, if it goes there.
    pub(crate) async fn apply(
        &self,
        source: Source,
        opened: &Opened,
        towards: Towards<'_>,
        options: &JobOptions,
        out: &Output,
    ) -> Result<Named, Failure> {
        let Towards { format: to, tp, config, dtype } = towards;
        let origin = Origin::of(opened, &source).await?;
        let Some(wanted) = self.wanted(opened, origin, to, out)? else {
            self.refuse_idle()?;
            if to == Format::TorchDist
                && self.arch.is_none()
                && !has_megatron_names(&source).await?
            {
                let way = match origin {
                    Origin::Megatron => "convert to hf first, and from there to torch-dist",
                    _ => "--arch gives a Hugging Face model the names of Megatron-Core",
                };
                out.note(&format!(
                    "the tensors keep their names, which Megatron-LM does not load; {way}"
                ));
            }
            return Ok(Named { source, config: None, report: None });
        };
        let mut how = MapOptions::default();
        how.allow_left_over = self.allow_left_over;
        how.params_dtype = dtype;
        if self.untie {
            how.tying = Tying::Untie;
        }
        if self.transformer_impl == Some(TransformerImpl::Local) {
            how.spec = LayerSpec::Local;
        }
        if to == Format::TorchDist {
            let config = config_of(opened, config).await?;
            let mapping = match wanted {
                Wanted::Auto => recognize_config(&config).map_err(|error| {
                    Failure::from(error).hint(
                        "name one with --arch, or a TOML file of your own (`dcp arch llama` is \
                         one to begin with); --arch none keeps the names",
                    )
                })?,
                Wanted::Of(mapping) => {
                    if let Ok(own) = recognize_config(&config)
                        && own.name() != mapping.name()
                    {
                        out.note(&format!(
                            "{CONFIG} is that of {}, and is taken for {} as asked: what only the \
                             former has is not among the arguments",
                            own.name(),
                            mapping.name()
                        ));
                    }
                    *mapping
                }
            };
            let divisor = self.make_vocab_divisible_by.unwrap_or(DIVISOR);
            let padding = Padding::Multiple { divisor, tensor_parallel: tp.into() };
            let (facts, notes) = mapping.read_config(&config, self.ignore_args)?;
            let facts = facts.with_padding(padding);
            let mut mapped = map_to_megatron(&source, &mapping, &facts, &how, options).await?;
            mapped.report.notes.splice(..0, notes);
            return Ok(Named { source: mapped.source, config: None, report: Some(mapped.report) });
        }
        for (given, option, does) in [
            (self.make_vocab_divisible_by.is_some(), "--make-vocab-divisible-by", "pads"),
            (self.transformer_impl.is_some(), "--transformer-impl", "chooses names"),
        ] {
            if given {
                let message = format!("{option} {does} for Megatron-Core, and this goes from it");
                return Err(Failure::new(Exit::Usage, message).hint("leave it out"));
            }
        }
        let mut facts = facts(opened, &source, out).await?;
        let given = match config {
            Some(folder) => Some(config_of(opened, Some(folder)).await?),
            None => None,
        };
        let mapping = match (wanted, given.as_ref().map(recognize_config)) {
            (Wanted::Of(mapping), _) => *mapping,
            (Wanted::Auto, Some(Ok(mapping))) => mapping,
            (Wanted::Auto, _) => recognized(&source, &facts).await?,
        };
        if let Some(config) = &given {
            // The model is opened with it, so that is how many tokens there are.
            let described = facts.described_by(&mapping.read_config(config, true)?.0);
            facts = described.map_err(|error| {
                let failure = Failure::from(error).instead_of(Exit::Bad, Exit::Usage);
                failure.hint("pass --config with the folder of this model, or leave it out")
            })?;
        }
        how.ignore_arguments = self.ignore_args || config.is_some();
        let mut mapped = map_to_hf(&source, &mapping, &facts, &how, options).await?;
        let config = match (to, config) {
            (Format::Hf, None) => Some(config_json(&mapping, &mut mapped)?),
            _ => None,
        };
        Ok(Named { source: mapped.source, config, report: Some(mapped.report) })
    }

    /// The mapping that is applied, if one is.
    fn wanted(
        &self,
        opened: &Opened,
        origin: Origin,
        to: Format,
        out: &Output,
    ) -> Result<Option<Wanted>, Failure> {
        let from_megatron = origin == Origin::Megatron;
        let name = match &self.arch {
            None if from_megatron && to == Format::Hf => "auto",
            None if to == Format::TorchDist && origin == Origin::HuggingFace => {
                out.note(
                    "it gets Megatron-Core's names, by config.json; --arch none keeps its own",
                );
                "auto"
            }
            None => return Ok(None),
            Some(name) => name,
        };
        if name == "none" {
            return Ok(None);
        }
        if from_megatron && to == Format::TorchDist {
            let message = format!(
                "--arch goes to Hugging Face or from there, and both {:?} and --to torch-dist are \
                 Megatron-Core's",
                opened.uri
            );
            return Err(Failure::new(Exit::Usage, message).hint("leave it out"));
        }
        if origin == Origin::HuggingFace && to != Format::TorchDist {
            let message = format!(
                "--arch goes to Megatron-Core or from there, and neither {:?} nor --to {to} is \
                 Megatron-Core's",
                opened.uri
            );
            return Err(
                Failure::new(Exit::Usage, message).hint("leave it out, or say --to torch-dist")
            );
        }
        Ok(Some(match name {
            "auto" => Wanted::Auto,
            name if name.ends_with(".toml") || name.contains('/') => {
                let bytes = read_at_most(Path::new(name), MAPPING_MAX);
                let text = bytes.and_then(|bytes| String::from_utf8(bytes).map_err(invalid));
                let text = text.map_err(|error| {
                    Failure::new(Exit::Io, error.to_string())
                        .context(format!("cannot read the mapping {name:?}"))
                })?;
                Wanted::Of(Box::new(Mapping::parse(&text, name)?))
            }
            name => Wanted::Of(Box::new(Mapping::builtin(name)?)),
        }))
    }

    /// Refuses options of a mapping where none is applied.
    fn refuse_idle(&self) -> Result<(), Failure> {
        for (given, option) in [
            (self.make_vocab_divisible_by.is_some(), "--make-vocab-divisible-by"),
            (self.transformer_impl.is_some(), "--transformer-impl"),
            (self.allow_left_over, "--allow-left-over"),
            (self.ignore_args, "--ignore-args"),
            (self.untie, "--untie"),
        ] {
            if given {
                let message = format!("{option} is for a mapping, and none is applied");
                return Err(Failure::new(Exit::Usage, message).hint("say --arch, or leave it out"));
            }
        }
        Ok(())
    }
}

/// What the arguments of a checkpoint tell. Those that were saved through PyTorch alone have them
/// as an object of their own.
/// What wrote no arguments wrote a configuration beside it.
async fn facts(opened: &Opened, source: &Source, out: &Output) -> Result<Facts, Failure> {
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
    let Some((facts, file)) = sidecar_config::facts(opened).await? else { return Ok(Facts::new()) };
    out.note(&format!("there are no arguments in it; {file} tells of the model"));
    Ok(facts)
}

/// Whether there are arguments of Megatron as an object of their own.
async fn has_args(source: &Source) -> Result<bool, Failure> {
    let is_object = |entry: &Entry| matches!(entry, Entry::Object(_));
    Ok(source.metadata().await?.get("args").is_some_and(is_object))
}

fn invalid(problem: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

/// The family of a Megatron checkpoint.
async fn recognized(source: &Source, facts: &Facts) -> Result<Mapping, Failure> {
    let families = || format!("families: {}", Mapping::families().join(", "));
    match recognize(&*source.metadata().await?, facts)? {
        Recognition::Found { family, .. } => Ok(Mapping::builtin(&family)?),
        Recognition::Ambiguous { candidates, why } => {
            let message = format!(
                "the model may be of several families, {}, as far as its weights tell: {why}",
                candidates.join(" or ")
            );
            Err(Failure::new(Exit::Usage, message).hint(format!(
                "say which with --arch, or --arch none to keep Megatron-Core's names; {}",
                families()
            )))
        }
        Recognition::Unknown { why } => {
            let why: Vec<_> = why.iter().map(|(name, what)| format!("{name}: {what}")).collect();
            let message = "the model is of no family that is known here".to_owned();
            Err(Failure::new(Exit::Usage, message).because(why).hint(format!(
                "name one with --arch, write a mapping of your own (`dcp arch llama > my.toml` \
                 shows how) and pass --arch my.toml, or keep Megatron-Core's names with --arch \
                 none; {}",
                families()
            )))
        }
        _ => Err(Failure::new(Exit::Usage, "the family cannot be told").hint(families())),
    }
}

/// The configuration of a model of Hugging Face: of the folder that was named, or of the source.
async fn config_of(opened: &Opened, folder: Option<&Path>) -> Result<serde_json::Value, Failure> {
    let absent = |place: String| {
        Failure::new(
            Exit::Usage,
            format!("there is no {CONFIG} in {place:?}, which tells the model"),
        )
        .hint("pass --config DIR, the folder that has it")
    };
    let bad = |error: serde_json::Error| {
        Failure::new(Exit::Bad, error.to_string()).context(format!("cannot read {CONFIG}"))
    };
    if let Some(folder) = folder {
        let path = folder.join(CONFIG);
        return match read_at_most(&path, CONFIG_MAX) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(bad),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(absent(folder.display().to_string()))
            }
            Err(error) => Err(Failure::new(Exit::Io, error.to_string())
                .context(format!("cannot read {:?}", path.display().to_string()))),
        };
    }
    let storage = &opened.folder;
    let key = Key::new(CONFIG).map_err(StorageError::from)?;
    if !storage.contains(&key).await? {
        return Err(absent(opened.place.clone()));
    }
    let len = storage.stat(&key).await?.byte_len;
    if len > CONFIG_MAX {
        let message = format!("{CONFIG} has {len} bytes, more than a configuration has");
        return Err(Failure::new(Exit::Bad, message));
    }
    serde_json::from_slice(&storage.read_range(&key, 0..len).await?).map_err(bad)
}

/// The configuration of the model that was made.
fn config_json(mapping: &Mapping, mapped: &mut Mapped) -> Result<(Key, Vec<u8>), Failure> {
    let config = mapping.config_json(&mapped.facts).map_err(|error| {
        Failure::from(error)
            .hint("pass --config DIR, the folder with the original model's config.json")
    })?;
    let is_open = |token| config.get(token).is_none_or(serde_json::Value::is_null);
    if ["bos_token_id", "eos_token_id"].into_iter().all(is_open) {
        let note = "config.json leaves bos_token_id and eos_token_id open: the tokenizer decides";
        mapped.report.notes.push(note.to_owned());
    }
    let mut text = serde_json::to_vec_pretty(&config).map_err(io::Error::from)?;
    text.push(b'\n');
    Ok((Key::new("config.json").map_err(StorageError::from)?, text))
}

/// Says what a mapping did.
pub(crate) fn tell(report: &MappingReport, out: &Output) {
    let what = match report.direction {
        dcp::mapping::Direction::ToMegatron => "Megatron-Core's",
        _ => "Hugging Face's",
    };
    out.note(&format!(
        "mapped as {}: {} made of {} of the checkpoint, under {what} names",
        report.family,
        count(report.created.len(), "tensor"),
        report.used.len()
    ));
    if !report.dropped.is_empty() {
        let dropped = count(report.dropped.len(), "key");
        let belong = if report.dropped.len() == 1 { "belongs" } else { "belong" };
        out.note(&format!("{dropped} {belong} to no model: {}", list(&report.dropped)));
    }
    if !report.left_over.is_empty() {
        let left = count(report.left_over.len(), "tensor");
        out.note(&format!("left out {left} without a rule: {}", list(&report.left_over)));
    }
    for (what, rows) in [("added", &report.padded), ("left out", &report.trimmed)] {
        for (name, rows) in rows {
            let rows = count(usize::try_from(*rows).unwrap_or(usize::MAX), "row");
            out.note(&format!("{what} {rows} of padding: {name}"));
        }
    }
    for note in &report.notes {
        out.note(note);
    }
}
