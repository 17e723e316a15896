//! The command line: what can be asked for, and the help that teaches it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use dcp::DType;

use crate::command;
use crate::options::destination::{AllowCallable, parse_dtype};

/// Look into, check, compare, convert and reshard model checkpoints.
///
/// dcp reads what PyTorch's torch.distributed.checkpoint and its FSDP, HSDP and tensor-parallel
/// users write, whatever the number of ranks, checkpoints of Megatron-Core and OLMo-core and the
/// runs they lie in, files of torch.save, safetensors files and Hugging Face folders. It needs no Python, no GPU and no trust in the file: nothing in
/// a checkpoint is ever executed.
#[derive(Debug, Parser)]
#[command(
    name = "dcp",
    version,
    arg_required_else_help = true,
    disable_help_subcommand = true,
    subcommand_required = true,
    max_term_width = 100,
    after_help = "Exit codes: 0 fine, 1 the checkpoint is bad or differs, 2 wrong usage, 3 input or output \
                  failed. `dcp --help` says more.",
    after_long_help = AFTER_LONG_HELP
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER_LONG_HELP: &str = "\
Examples:
  dcp ls runs                                     the checkpoints there, and which are whole
  dcp inspect runs/step_1000                      what is in it
  dcp inspect runs/step_1000 --shards lm_head     how a tensor is cut, and which file has which part
  dcp verify runs/step_1000 --deep                compare every byte with its checksum
  dcp stats runs/step_1000 --nan                  find the NaN that killed the run
  dcp diff runs/step_1000 model.safetensors --model-only
  dcp get runs/step_1000 model.embed.weight --slice 0:2,:
  dcp convert runs/step_1000 model.safetensors --to safetensors
  dcp reshard runs/step_1000 resharded --ranks 8
  dcp report runs/step_1000 -o report.html       a page to look around in, for any browser

URIs:
  A plain path or file://PATH: the directory of a checkpoint, or a file of torch.save or
  safetensors. What it is, is told by what is in it.

Errors:
  `error:`, the causes and a hint, on stderr. With --json the last line on stderr is one JSON
  object instead, after notes, which --quiet leaves out:
  {\"error\": {\"kind\", \"message\", \"causes\": [TEXT, …], \"hint\": TEXT or null, \"exit_code\"}};
  kind is one of bad_checkpoint, usage, io, interrupted. What `verify` and `diff` find is no error
  but their output.

Exit codes:
  0  fine
  1  the checkpoint is bad: damaged, incomplete, or no checkpoint at all; or two differ
  2  wrong usage: bad arguments, no such key, a target that exists already
  3  input or output failed: no such path, no permission, a full disk
  129, 130, 143  interrupted; what was being written is removed again";

/// Options of every command.
#[derive(Args, Clone, Debug)]
pub(crate) struct Global {
    /// Whether to color the output.
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        help_heading = "Output"
    )]
    pub(crate) color: ColorChoice,

    /// No progress bar and no notes; errors only.
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Output")]
    pub(crate) quiet: bool,

    /// Say what is being done, on stderr; twice for more.
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Output")]
    pub(crate) verbose: u8,

    /// Follow symbolic links that lead out of the folder of a checkpoint.
    ///
    /// As in a run whose iterations are links to another disk. Only for folders that you trust: a
    /// link can lead to any file. In the cache of the Hugging Face hub, links to the files of the
    /// same repository are followed anyway.
    #[arg(long, global = true, hide_short_help = true, help_heading = "Input")]
    pub(crate) follow_links: bool,

    /// Read what this rank saved, of ranks that saved without collectives and differ.
    #[arg(long, global = true, hide_short_help = true, value_name = "N", help_heading = "Input")]
    pub(crate) rank: Option<u32>,

    /// Read this variant of a Hugging Face model, such as fp16 for model.fp16.safetensors; by
    /// default the main files.
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        value_name = "NAME",
        help_heading = "Input"
    )]
    pub(crate) variant: Option<String>,
}

/// When to color.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Ls(command::Ls),
    Inspect(Inspect),
    Verify(Verify),
    Get(Get),
    Stats(command::Stats),
    Diff(command::Diff),
    Convert(command::Convert),
    Reshard(command::Reshard),
    Average(command::Average),
    Merge(command::Merge),
    Unshard(command::Unshard),
    RewriteMetadata(command::RewriteMetadata),
    Report(command::Report),
    Arch(command::Arch),
    Completions(Completions),
    Man(command::ManPages),
}

/// Show what a checkpoint holds.
///
/// Prints the tree of its tensors and objects with dtype, shape, bytes and number of shards, and
/// its files. No tensor data is read, so it is quick however large the checkpoint is.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp inspect runs/step_1000
  dcp inspect runs/step_1000 --filter 'model.*'
  dcp inspect runs/step_1000 --shards model.embed.weight
  dcp inspect runs/step_1000 --json | jq '.keys | length'
  dcp inspect run/iter_0001000 --args                 what a run of Megatron-LM was started with
  dcp inspect run --json | jq .megatron.parallel

JSON:
  {\"format\": …, \"keys\": {FQN: KEY, …}, \"files\": {NAME: BYTES, …}, \"callables\": [CALLABLE, …],
   \"unfinished\": [TEXT, …]}
  KEY is {\"kind\": \"tensor\", \"dtype\", \"shape\", \"bytes\",
          \"chunks\": [{\"offsets\", \"sizes\", \"file\", \"byte_offset\", \"byte_len\"}, …],
          \"device\": where torch.load puts it, if not on the CPU}
      or {\"kind\": \"object\", \"value\"}; a value that JSON lacks is tagged {\"type\": …, …}.
  CALLABLE is {\"key\", \"path\", \"name\", \"dangerous\"}: what Python runs when it loads that object,
  and is not known to be harmless; `dangerous` ones are known to run commands or code. The last two
  are left out where there are none; \"unfinished\" says what is missing of a Hugging Face model.
  dtypes have PyTorch's names without `torch.`; the bytes of a missing file are null.
  Of Megatron-Core's checkpoints there is \"megatron\", too: \"format\", \"written_by\", \"read_by\",
  \"iteration\", \"parallel\", \"layers\", \"optimizer\", \"objects\", …; --common and --args print
  the common state and the arguments instead.")]
pub(crate) struct Inspect {
    /// The checkpoint.
    pub(crate) uri: String,

    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,

    /// Draw how the chunks of this tensor lie in it, and list which file holds each.
    #[arg(long, value_name = "FQN", conflicts_with = "json")]
    pub(crate) shards: Option<String>,

    /// Show only names that match: `*` stands for any text, `?` for one character.
    #[arg(long, value_name = "GLOB")]
    pub(crate) filter: Option<String>,

    /// Print the common state of a checkpoint of Megatron-Core, all but the arguments in it.
    #[arg(long, conflicts_with_all = ["shards", "filter", "all"])]
    pub(crate) common: bool,

    /// Print the arguments that the run of a checkpoint of Megatron-Core was started with.
    #[arg(long, conflicts_with_all = ["shards", "filter", "all", "common"])]
    pub(crate) args: bool,

    /// Show every layer, also those that are alike, and every sharded object.
    #[arg(long)]
    pub(crate) all: bool,
}

/// Check that a checkpoint is whole.
///
/// Looks at the structure: every file there and long enough, every chunk inside its tensor, no
/// two overlapping, no element missing. With --deep, reads all of it: the CRC of every record,
/// every blob's own dtype and shape against the index, every object decoded. All problems are
/// listed, each with its key, file and offset; the exit code is 1 if there is one.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp verify runs/step_1000
  dcp verify runs/step_1000 --deep
  dcp verify runs/step_1000 --json | jq '.problems[]'")]
pub(crate) struct Verify {
    /// The checkpoint.
    pub(crate) uri: String,

    /// Read every byte and compare it with its checksum.
    #[arg(long)]
    pub(crate) deep: bool,

    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print one tensor or object, or write it to a file.
///
/// Reads only the bytes that are needed: of a large tensor that is printed, its corners.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp get runs/step_1000 model.embed.weight
  dcp get runs/step_1000 model.embed.weight --slice 0:2,:
  dcp get runs/step_1000 model.embed.weight --slice=-1 --output last_row.npy
  dcp get runs/step_1000 model.embed.weight --output embed.safetensors --dtype bf16
  dcp get runs/step_1000 optimizer.param_groups --output groups.pt
  dcp get runs/step_1000 optimizer.param_groups.0.lr --json

Slices:
  As in NumPy: per axis START:STOP:STEP, each of which may be left out or negative, or one index,
  which drops the axis; `...` stands for all axes that are not mentioned.
  Checksums are compared for the stored chunks that a slice holds whole; `dcp verify --deep`
  compares all.")]
pub(crate) struct Get {
    /// The checkpoint.
    pub(crate) uri: String,

    /// The name of the tensor or object, as `dcp inspect` shows it.
    pub(crate) fqn: String,

    /// Write it to this file: a tensor to .npy, .safetensors or .pt, an object to .pt. torch.load
    /// returns what a .pt file holds.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Cast a floating-point tensor to this dtype, as `dcp convert --dtype` does.
    #[arg(long, value_name = "DTYPE", value_parser = parse_dtype)]
    pub(crate) dtype: Option<DType>,

    #[command(flatten)]
    pub(crate) callables: AllowCallable,

    /// Take only this part of the tensor.
    #[arg(short, long, allow_hyphen_values = true)]
    pub(crate) slice: Option<String>,

    /// Replace the output file if there is one.
    #[arg(long, requires = "output")]
    pub(crate) overwrite: bool,

    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print completions for a shell.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp completions bash > ~/.local/share/bash-completion/completions/dcp
  dcp completions zsh > ~/.zfunc/_dcp
  dcp completions fish > ~/.config/fish/completions/dcp.fish")]
pub(crate) struct Completions {
    /// The shell.
    pub(crate) shell: Shell,
}
