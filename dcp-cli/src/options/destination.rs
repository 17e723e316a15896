//! Options of commands that write a checkpoint in any format.

use std::any::TypeId;
use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, Command};
use dcp::DType;
use dcp::jobs;
use dcp::jobs::{Format, Rollback};
use dcp::megatron::framework::TORCH_DIST;

use super::compress::Compress;
use super::parse::{parse_bytes, parse_dtype};
use super::torch_dist::TorchDist;
use super::writing::Writing;
use crate::plugins::Target;

/// Another name of [`TORCH_DIST`].
const MEGATRON: &str = "megatron";

/// Reads the name of a format, as the library does; also those of frameworks and plug-ins.
#[derive(Clone, Default)]
struct FormatParser {
    targets: Vec<Target>,
}

impl TypedValueParser for FormatParser {
    type Value = Format;

    fn parse_ref(
        &self,
        cmd: &Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Format, clap::Error> {
        let name = value.to_string_lossy();
        // The program's name for the format that Megatron-Core calls torch_dist.
        let name = if name == MEGATRON { TORCH_DIST.name().into() } else { name };
        if let Some((name, _)) = self.targets.iter().find(|(known, _)| **known == name) {
            return Ok(Format::Registered(name));
        }
        name.parse().map_err(|error: jobs::Error| {
            if error.kind() == jobs::ErrorKind::Undecided {
                let hint = error.hint().unwrap_or_default();
                let message = format!("{error}: {hint}, {TORCH_DIST} one of Megatron-Core\n");
                return clap::Error::raw(ErrorKind::InvalidValue, message).with_cmd(cmd);
            }
            let names = PossibleValuesParser::new(self.values());
            match names.parse_ref(cmd, arg, value) {
                Err(error) => error,
                Ok(_) => clap::Error::raw(ErrorKind::InvalidValue, format!("{error}\n")),
            }
        })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.values()))
    }
}

impl FormatParser {
    fn values(&self) -> impl Iterator<Item = PossibleValue> {
        let plain = |format: Format| (format.name(), format.description());
        let all = Format::ALL.into_iter().map(plain).chain(self.targets.iter().copied());
        all.map(|(name, description)| PossibleValue::new(name).help(description))
    }
}

/// Lets `--to` of every command of `program` take the names of `targets`.
pub(crate) fn with_targets(program: Command, targets: &[Target]) -> Command {
    let parser = FormatParser { targets: targets.to_vec() };
    program.mut_subcommands(|command| {
        command.mut_args(|arg| match arg.get_value_parser().type_id() == TypeId::of::<Format>() {
            true => arg.value_parser(parser.clone()),
            false => arg,
        })
    })
}

/// How a checkpoint is written.
#[derive(Args, Clone, Debug)]
pub(crate) struct Destination {
    /// The format to write; by default what the name of the target says.
    #[arg(long, value_name = "FORMAT", value_parser = FormatParser::default())]
    to: Option<Format>,

    /// How many ranks to write for; each gets a file. For dcp.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    ranks: Option<u32>,

    /// Cast floating-point tensors to this dtype, such as bf16. float8 and narrower ones stay, and
    /// so do the scales of quantized weights, the biases that balance experts and the steps that an
    /// optimizer counts.
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    dtype: Option<DType>,

    /// Keep the dtype of keys that match or are below this (new) name; may be given again.
    #[arg(hide_short_help = true, long, value_name = "GLOB", requires = "dtype")]
    keep_dtype: Vec<String>,

    /// The most bytes of tensors in a file; 5GB by default. For hf.
    #[arg(hide_short_help = true, long, value_name = "BYTES", value_parser = parse_bytes)]
    max_shard_size: Option<u64>,

    /// Copy config and tokenizer files from this directory, so that transformers finds all it
    /// needs. For hf, where a Hugging Face source gives its own by default; with --arch, for
    /// torch-dist too, whose model it defines.
    #[arg(long, value_name = "DIR")]
    config: Option<PathBuf>,

    /// Write the stream that PyTorch before 1.6 reads. For torch-save.
    #[arg(hide_short_help = true, long)]
    legacy: bool,

    /// The device that torch.load puts all tensors on; by default those of a torch.save file keep
    /// theirs, such as cuda:0. For torch-save.
    #[arg(hide_short_help = true, long, value_name = "DEVICE", value_parser = ["cpu"])]
    device: Option<String>,

    #[command(flatten)]
    compress: Compress,

    #[command(flatten)]
    pub(crate) torch_dist: TorchDist,

    #[command(flatten)]
    pub(crate) writing: Writing,
}

impl Destination {
    /// The library's destination, of these options.
    pub(crate) fn at(&self, uri: &str, rollback: &Rollback) -> jobs::Destination {
        let mut destination = jobs::Destination::new(uri)
            .to(self.to)
            .ranks(self.ranks)
            .dtype(self.dtype)
            .max_shard_bytes(self.max_shard_size)
            .legacy(self.legacy)
            .device(self.device.clone())
            .with(self.torch_dist.target())
            .compression(self.compress.method())
            .overwrite(self.writing.overwrite)
            .rollback(rollback);
        for pattern in &self.keep_dtype {
            destination = destination.keep_dtype(pattern);
        }
        match &self.config {
            Some(folder) => destination.config(folder),
            None => destination,
        }
    }
}
