//! Options of commands that write a checkpoint in any format, and the writing.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, ValueEnum};
use dcp::DType;
use dcp::convert::{
    CastOptions, JobOptions, Source, StatePart, WriteReport, is_exact, unmatched_patterns, view,
};
use dcp::core::{Key, Value};
use dcp::formats::torch_save::{TorchSaveForm, TorchSaveOptions};
use dcp::megatron::ParallelLayout;
use dcp::planner::KeyFilter;

use crate::failure::{Exit, Failure};
use crate::hf_config;
use crate::new_folders::NewFolders;
use crate::open::Opened;
use crate::overlap_guard::{Shape, keep_apart};
use crate::target;
use crate::torch_dist::TorchDist;

/// A format to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// One safetensors file.
    Safetensors,
    /// A directory as Hugging Face models have it: model.safetensors, or several files and an index.
    Hf,
    /// One file of torch.save, objects included.
    TorchSave,
    /// A directory of PyTorch's torch.distributed.checkpoint.
    Dcp,
    /// A directory of Megatron-Core's torch_dist.
    #[value(alias = "megatron")]
    TorchDist,
}

impl fmt::Display for Format {
    /// As `--to` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Safetensors => "safetensors",
            Self::Hf => "hf",
            Self::TorchSave => "torch-save",
            Self::Dcp => "dcp",
            Self::TorchDist => "torch-dist",
        })
    }
}

/// Reads the name of a format; of an ambiguous one it names all that may be meant.
#[derive(Clone)]
struct FormatParser;

impl TypedValueParser for FormatParser {
    type Value = Format;

    fn parse_ref(
        &self,
        cmd: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Format, clap::Error> {
        if value == "torch" || value == "pytorch" {
            let message = format!(
                "{:?} names several formats: torch-save is one file of torch.save, dcp a directory \
                 of torch.distributed.checkpoint, torch-dist one of Megatron-Core\n",
                value.to_string_lossy()
            );
            return Err(clap::Error::raw(ErrorKind::InvalidValue, message).with_cmd(cmd));
        }
        EnumValueParser::<Format>::new().parse_ref(cmd, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let all = Format::value_variants().iter();
        Some(Box::new(all.filter_map(ValueEnum::to_possible_value)))
    }
}

/// The most bytes of tensors in a file of a Hugging Face model, as transformers has it.
const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// How a checkpoint is written.
#[derive(Args, Clone, Debug)]
pub(crate) struct Destination {
    /// The format to write; by default what the name of the target says.
    #[arg(long, value_name = "FORMAT", value_parser = FormatParser)]
    to: Option<Format>,

    /// How many ranks to write for; each gets a file. For dcp.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,

    /// Cast floating-point tensors to this dtype, such as bf16. float8 and narrower ones stay, and
    /// so do the scales of quantized weights, the biases that balance experts and the steps that an
    /// optimizer counts.
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    dtype: Option<DType>,

    /// Leave the dtype of keys that match, or lie below this (new) name; may be given again.
    #[arg(long, value_name = "GLOB", requires = "dtype")]
    keep_dtype: Vec<String>,

    /// The most bytes of tensors in a file; 5GB by default. For hf.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    max_shard_size: Option<u64>,

    /// Copy config and tokenizer files from this directory, so that transformers finds all it
    /// needs. For hf, where a Hugging Face source gives its own by default; with --arch, for
    /// torch-dist too, of which it tells the model.
    #[arg(long, value_name = "DIR")]
    config: Option<PathBuf>,

    /// Write the stream that PyTorch before 1.6 reads. For torch-save.
    #[arg(long)]
    legacy: bool,

    /// Let Python put all tensors on this device; by default those of a torch.save file stay where
    /// they were, such as cuda:0. For torch-save.
    #[arg(long, value_name = "DEVICE", value_parser = ["cpu"])]
    device: Option<String>,

    #[command(flatten)]
    pub(crate) torch_dist: TorchDist,

    #[command(flatten)]
    pub(crate) writing: Writing,
}

/// What the source tells of how it is to be written.
#[derive(Default)]
pub(crate) struct For {
    /// The files beside the weights that a Hugging Face model gets when no others were asked for.
    pub(crate) beside: Vec<(Key, Vec<u8>)>,
    /// The ranks that a checkpoint of Megatron-Core is written for.
    pub(crate) layout: Option<ParallelLayout>,
    /// The common state that it gets, if not the one among the keys.
    pub(crate) common: Option<Value>,
}

/// Options of everything that writes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Writing {
    /// Replace the target if it exists; until the new one is complete, the old one stays.
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Only say what would be written.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Print a JSON report.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    callables: AllowCallable,

    /// Tensor data to hold in memory at once, such as 64MiB.
    #[arg(long, value_name = "BYTES", default_value = "256MiB", value_parser = parse_bytes)]
    max_memory: u64,

    /// Reads in flight.
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: u16,
}

impl Writing {
    /// `options` with what was asked for.
    pub(crate) fn options(&self, options: JobOptions) -> JobOptions {
        options
            .with_max_memory(self.max_memory)
            .with_parallelism(usize::from(self.jobs))
            .as_dry_run(self.dry_run)
            .with_callables(self.callables.filter())
    }
}

/// What Python may run when it loads what is written.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct AllowCallable {
    /// Write objects with this class or function of Python too, although Python runs it when it
    /// loads them and it is not known to be harmless. A GLOB of whole names (`mypackage.*`), or the
    /// beginning of names up to a dot (`mypackage`); may be given again.
    #[arg(long, value_name = "GLOB")]
    allow_callable: Vec<String>,
}

impl AllowCallable {
    /// The names that are admitted.
    pub(crate) fn filter(&self) -> KeyFilter {
        KeyFilter::any_of(&self.allow_callable)
    }
}

/// The dtype that a tensor of this name and dtype gets where floats are cast to `dtype`.
pub(crate) fn cast_to(dtype: DType, fqn: &str, from: DType) -> Option<DType> {
    let wide = [DType::Float64, DType::Float32, DType::Float16, DType::BFloat16];
    (wide.contains(&from) && !is_exact(fqn)).then_some(dtype)
}

/// Reads a dtype by PyTorch's name or the usual short one.
pub(crate) fn parse_dtype(text: &str) -> Result<DType, String> {
    let name = match text.strip_prefix("torch.").unwrap_or(text) {
        "bf16" => "bfloat16",
        "fp16" | "f16" | "half" => "float16",
        "fp32" | "f32" | "float" => "float32",
        "fp64" | "f64" | "double" => "float64",
        "fp8" | "f8" | "fp8_e4m3" | "e4m3" => "float8_e4m3fn",
        "fp8_e5m2" | "e5m2" => "float8_e5m2",
        name => name,
    };
    let dtype: DType = name.parse().map_err(|_| format!("{text:?} is no dtype"))?;
    if dcp::convert::is_float(dtype) { Ok(dtype) } else { Err(format!("{dtype} is no float")) }
}

/// Reads a number of bytes: `300`, `64MiB`, `5GB`, `1.5g` (a letter alone is binary).
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: f64 = number.parse().map_err(|_| format!("{text:?} is no number of bytes"))?;
    let unit = unit.trim().to_ascii_lowercase();
    let power = |base: f64, letter: &str| {
        let place = ["", "k", "m", "g", "t", "p"].iter().position(|known| *known == letter)?;
        Some(base.powi(i32::try_from(place).ok()?))
    };
    let factor = if let Some(letter) = unit.strip_suffix("ib") {
        power(1024.0, letter).filter(|_| !letter.is_empty())
    } else if let Some(letter) = unit.strip_suffix('b') {
        power(1000.0, letter)
    } else {
        power(1024.0, &unit)
    };
    let bytes = number * factor.ok_or_else(|| format!("{unit:?} is no unit; write KiB or MB"))?;
    // Above 2^53 there is no difference that anybody meant.
    if bytes < 9e15 { Ok(bytes as u64) } else { Err(format!("{text:?} is too many bytes")) }
}

impl Destination {
    /// The format for `target`: the one asked for, or the one that its name says. Options of
    /// another one are errors.
    pub(crate) fn format(&self, target: &str) -> Result<Format, Failure> {
        let format = self.asked_for(target)?;
        for (given, option, of) in [
            (self.ranks.is_some(), "--ranks", Format::Dcp),
            (self.max_shard_size.is_some(), "--max-shard-size", Format::Hf),
            (self.config.is_some() && format != Format::TorchDist, "--config", Format::Hf),
            (
                self.torch_dist.given().is_some(),
                self.torch_dist.given().unwrap_or_default(),
                Format::TorchDist,
            ),
            (self.legacy, "--legacy", Format::TorchSave),
            (self.device.is_some(), "--device", Format::TorchSave),
        ] {
            if given && of != format {
                let message = format!("{option} is for {of}, and {target:?} becomes {format}");
                return Err(Failure::new(Exit::Usage, message)
                    .hint(format!("leave it out, or say --to {of}")));
            }
        }
        Ok(format)
    }

    fn asked_for(&self, target: &str) -> Result<Format, Failure> {
        if let Some(format) = self.to {
            return Ok(format);
        }
        if target.ends_with(".safetensors") {
            return Ok(Format::Safetensors);
        }
        if [".pt", ".pth", ".bin", ".ckpt"].iter().any(|ending| target.ends_with(ending)) {
            return Ok(Format::TorchSave);
        }
        Err(Failure::new(Exit::Usage, format!("cannot tell in which format to write {target:?}"))
            .hint("say --to safetensors, hf, torch-save, dcp or torch-dist"))
    }

    /// The directory that files beside the weights come from.
    pub(crate) fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// The part of a training state that such a target gets when nothing else is asked for.
    pub(crate) fn usual_part(&self, target: &str) -> Result<StatePart, Failure> {
        Ok(match self.format(target)? {
            Format::Safetensors | Format::TorchSave | Format::Dcp | Format::TorchDist => {
                StatePart::Everything
            }
            Format::Hf => StatePart::Model,
        })
    }

    /// The dtype that floats are cast to, when one was asked for.
    pub(crate) fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Which dtype a tensor gets, by its name and the dtype it has, when one was asked for.
    pub(crate) fn cast_rule(
        &self,
    ) -> Option<impl Fn(&str, DType) -> Option<DType> + Send + Sync + use<>> {
        let (dtype, kept) = (self.dtype?, KeyFilter::any_of(&self.keep_dtype));
        Some(move |fqn: &str, from| cast_to(dtype, fqn, from).filter(|_| !kept.selects(fqn, None)))
    }

    /// Refuses a target that would touch what was opened.
    pub(crate) async fn keep_apart(&self, opened: &Opened, target: &str) -> Result<(), Failure> {
        let shape = match self.format(target)? {
            Format::Safetensors | Format::TorchSave => Shape::File,
            Format::Hf | Format::Dcp | Format::TorchDist => Shape::Folder,
        };
        keep_apart(opened, target, shape).await
    }

    /// Writes `source` to `target`.
    pub(crate) async fn write(
        &self,
        source: &Source,
        target: &str,
        how: For,
        options: &JobOptions,
    ) -> Result<WriteReport, Failure> {
        let (overwrite, dry_run) = (self.writing.overwrite, options.dry_run);
        let metadata = source.metadata().await?;
        let tensors = metadata.iter().filter(|(_, entry)| entry.as_tensor().is_some());
        let tensors: Vec<_> = tensors.map(|(fqn, _)| (&**fqn, None)).collect();
        let unmatched = unmatched_patterns("keep-dtype", &self.keep_dtype, &tensors);
        let (source, cast) = match self.cast_rule() {
            Some(rule) => {
                let casts = CastOptions::default();
                let (source, cast) = view::Cast::apply(source, rule, casts, options).await?;
                (source, Some(cast))
            }
            None => (source.clone(), None),
        };
        let source = &source;
        let folders = NewFolders::before(target);
        let mut report = match self.format(target)? {
            Format::Safetensors => {
                let target = target::file(target, overwrite, dry_run).await?;
                dcp::convert::to_safetensors(source, &target, options).await?
            }
            Format::TorchSave => {
                let target = target::file(target, overwrite, dry_run).await?;
                let zip = TorchSaveForm::default();
                let form = if self.legacy { TorchSaveForm::Legacy } else { zip };
                let mut how = TorchSaveOptions::from(form);
                how.device.clone_from(&self.device);
                dcp::convert::to_torch_save(source, &target, how, options).await?
            }
            Format::Hf => {
                let max_shard_bytes = self.max_shard_size.unwrap_or(MAX_SHARD_BYTES);
                let mut files = match &self.config {
                    Some(from) => hf_config::files(from)?,
                    None => Vec::new(),
                };
                hf_config::complete(&mut files, how.beside);
                hf_config::write(source, target, files, max_shard_bytes, overwrite, options).await?
            }
            Format::Dcp => {
                let writer = target::directory(target, overwrite, dry_run).await?;
                dcp::convert::reshard(source, &writer, self.ranks.unwrap_or(1), options).await?
            }
            Format::TorchDist => {
                let layout = how.layout.unwrap_or_else(|| ParallelLayout::new(1, 1));
                let what = (layout, how.common);
                self.torch_dist.write(source, target, what, overwrite, options).await?
            }
        };
        if !options.dry_run {
            folders.keep();
        }
        report.cast = cast.map(|cast| cast.report());
        report.unmatched = unmatched;
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::{is_exact, parse_bytes};

    #[test]
    fn what_balances_experts_keeps_its_dtype() {
        for name in [
            "model.layers.3.mlp.gate.e_score_correction_bias",
            "decoder.layers.mlp.router.expert_bias",
            "optim.state.w.step",
            "w.weight_scale_inv",
        ] {
            assert!(is_exact(name), "{name}");
        }
        for name in
            ["model.layers.3.mlp.gate.weight", "decoder.layers.mlp.router.weight", "w.steps"]
        {
            assert!(!is_exact(name), "{name}");
        }
    }

    #[test]
    fn bytes_are_written_in_many_ways() {
        for (text, bytes) in [
            ("300", 300),
            ("64MiB", 64 << 20),
            ("5GB", 5_000_000_000),
            ("1.5g", 3 << 29),
            ("2 KB", 2000),
            ("7b", 7),
            ("0", 0),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "MiB", "-1", "1x", "1.2.3", "9999999PiB", "1ib", "inf", "nan"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
