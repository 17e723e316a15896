//! The command line and its help.

use clap::{Parser, Subcommand};

use crate::command;
use crate::options::Global;
use crate::ranks::Sharing;

/// Look into, check, compare, convert and reshard model checkpoints.
///
/// dcp reads checkpoints of PyTorch's torch.distributed.checkpoint, of Megatron-Core and OLMo-core
/// and the folders of their runs, torch.save files, safetensors files and Hugging Face folders,
/// saved by any number of ranks. It needs no Python and no GPU, and never executes anything in a
/// checkpoint.
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
  dcp copy runs/step_1000 s3://models/step_1000   to another storage, unchanged
  dcp prune runs --keep-last 3 --dry-run           which checkpoints would be deleted, and why
  dcp report runs/step_1000 -o report.html       a page to look around in, for any browser
  dcp trace traces                                where the time of a save went, by rank and file

URIs:
  A plain path or file://PATH: the directory of a checkpoint, or a file of torch.save or
  safetensors. The format is recognized by the content. s3://BUCKET/PATH, gs://BUCKET/PATH,
  az://CONTAINER/PATH and abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH are read and written
  with the credentials in the environment, https://HOST/PATH is read.

Errors:
  `error:`, the causes and a hint, on stderr. With --json the last line on stderr is one JSON
  object instead, after notes, which --quiet leaves out:
  {\"error\": {\"kind\", \"message\", \"causes\": [TEXT, …], \"hint\": TEXT or null, \"exit_code\"}};
  kind is one of bad_checkpoint, usage, io, interrupted. What `verify` and `diff` find is not an
  error but their output.

Exit codes:
  0  fine
  1  the checkpoint is bad: damaged, incomplete, or no checkpoint at all; or two differ
  2  wrong usage: bad arguments, no such key, a target that exists already
  3  input or output failed: no such path, no permission, a full disk
  129, 130, 143  interrupted; what was being written is removed again";

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Ls(command::Ls),
    Inspect(command::Inspect),
    Verify(command::Verify),
    Get(command::Get),
    Stats(command::Stats),
    Diff(command::Diff),
    Convert(command::Convert),
    Copy(command::Copy),
    Reshard(command::Reshard),
    Average(command::Average),
    Merge(command::Merge),
    Prune(command::Prune),
    Unshard(command::Unshard),
    RewriteMetadata(command::RewriteMetadata),
    Report(command::Report),
    Trace(command::Trace),
    Arch(command::Arch),
    Help(command::Help),
    Completions(command::Completions),
    Man(command::ManPages),
}

impl Command {
    /// Whether it changes checkpoints, or makes them.
    pub(crate) fn writes(&self) -> bool {
        !matches!(self, Self::Verify(_) | Self::Diff(_) | Self::Stats(_))
    }

    /// What the ranks of a launcher do of the command.
    pub(crate) fn sharing(&self) -> Sharing {
        match self {
            Self::Verify(verify) if verify.deep => Sharing::All,
            Self::Diff(diff) if !diff.keys_only => Sharing::All,
            Self::Convert(_)
            | Self::Copy(_)
            | Self::Reshard(_)
            | Self::Stats(_)
            | Self::Average(_)
            | Self::Merge(_)
            | Self::Unshard(_) => Sharing::All,
            Self::Diff(_) | Self::Report(_) | Self::Prune(_) | Self::RewriteMetadata(_) => {
                Sharing::First
            }
            _ => Sharing::None,
        }
    }
}
