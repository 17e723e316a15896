//! Options of commands that write a checkpoint in any format.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, ValueEnum};
use dcp::DType;
use dcp::checkpoint;
use dcp::convert::JobOptions;
use dcp::planner::KeyFilter;

use crate::options::torch_dist::TorchDist;
use crate::session::Session;

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

impl From<Format> for checkpoint::Format {
    fn from(format: Format) -> Self {
        match format {
            Format::Safetensors => Self::Safetensors,
            Format::Hf => Self::HuggingFace,
            Format::TorchSave => Self::TorchSave,
            Format::Dcp => Self::Dcp,
            Format::TorchDist => Self::TorchDist,
        }
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
    /// The library's destination, of these options.
    pub(crate) fn at(&self, uri: &str, session: &Session) -> checkpoint::Destination {
        let mut destination = checkpoint::Destination::new(uri)
            .to(self.to.map(Into::into))
            .ranks(self.ranks)
            .dtype(self.dtype)
            .max_shard_bytes(self.max_shard_size)
            .legacy(self.legacy)
            .device(self.device.clone())
            .megatron(self.torch_dist.target())
            .overwrite(self.writing.overwrite)
            .rollback(&session.rollback);
        for pattern in &self.keep_dtype {
            destination = destination.keep_dtype(pattern);
        }
        match &self.config {
            Some(folder) => destination.config(folder),
            None => destination,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

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
