//! Options of every command.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;

use clap::builder::TypedValueParser;
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};

use super::parse::parse_bytes;
use crate::output::style::ColorChoice;

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

    /// Log what the command does to stderr; twice for more.
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Output")]
    pub(crate) verbose: u8,

    /// Record the requests to storages and their times in this file, for `dcp trace` and Perfetto.
    ///
    /// Of several ranks, each writes a file of its own: rank 0 this one, here t.json, and rank 3
    /// t.rank3.json.
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        value_name = "FILE",
        help_heading = "Output"
    )]
    pub(crate) trace: Option<PathBuf>,

    /// Follow symbolic links that lead out of the folder of a checkpoint.
    ///
    /// As in a run whose iterations are links to another disk. Only for folders that you trust: a
    /// link can lead to any file. In the cache of the Hugging Face hub, links to the files of the
    /// same repository are followed anyway.
    #[arg(long, global = true, hide_short_help = true, help_heading = "Input")]
    pub(crate) follow_links: bool,

    /// A setting of object stores, such as aws_region=eu-west-1; can be given several times.
    ///
    /// The names are those of the environment variables of the provider in lower case, such as
    /// aws_endpoint, google_service_account or azure_storage_account_name, and coalesce_gap,
    /// request_bytes, parallelism, bytes_in_flight, part_bytes, deadline, attempts_max and
    /// stall_timeout, in bytes and seconds, and hedge_after_ms: a read that got nothing for so many
    /// milliseconds is requested again. Secrets are better given by environment variables, which
    /// other users do not see.
    #[arg(
        long = "storage-option",
        global = true,
        hide_short_help = true,
        value_name = "NAME=VALUE",
        value_parser = StorageOptionParser,
        help_heading = "Input"
    )]
    pub(crate) storage_options: Vec<StorageOption>,
    /// Keep what is read from remote storages in this folder on local disk, which commands and jobs
    /// of a node share.
    ///
    /// A byte that was read before is not fetched again, as long as its object has not changed. Only
    /// for you: others must not be able to write to the folder.
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        value_name = "DIR",
        env = "DCP_CACHE_DIR",
        help_heading = "Input"
    )]
    pub(crate) cache_dir: Option<PathBuf>,

    /// The size of that folder; what was not used for longest is removed.
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        value_name = "BYTES",
        default_value = "64GiB",
        value_parser = parse_bytes,
        help_heading = "Input"
    )]
    pub(crate) cache_size: u64,

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

    /// Run in this process alone, although a launcher started it as one of several ranks.
    ///
    /// Long commands that mpirun, srun, torchrun or Kubernetes start on several ranks run as one:
    /// `verify --deep`, `convert`, `reshard`, `average`, `merge`, `unshard`, `copy`, `stats` and
    /// `diff` are divided among them.
    #[arg(long, global = true, hide_short_help = true, help_heading = "Ranks")]
    pub(crate) single: bool,

    /// How long to wait for a rank that does not start, or does not answer any more.
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        value_name = "SECONDS",
        default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..=86_400),
        help_heading = "Ranks"
    )]
    pub(crate) rank_timeout: u64,
}

impl Global {
    /// Adds the settings of object stores that are before the name of the command. Of an option that is
    /// before and after it, clap keeps what is after; settings of different names all count.
    pub(crate) fn add_storage_options_before_command(&mut self, args: &[OsString]) {
        let before =
            BeforeCommand::try_parse_from(args).map(|before| before.global.storage_options);
        self.storage_options.splice(0..0, before.unwrap_or_default());
    }
}

/// The arguments up to the name of the command.
#[derive(Parser)]
struct BeforeCommand {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    _command: AnyCommand,
}

#[derive(Subcommand)]
enum AnyCommand {
    #[command(external_subcommand)]
    Any(
        #[expect(dead_code, reason = "clap needs a place for the arguments of the command")]
        Vec<OsString>,
    ),
}

/// A setting of object stores. Its value may be a secret.
#[derive(Clone)]
pub(crate) struct StorageOption {
    pub(crate) name: String,
    pub(crate) value: String,
}

impl fmt::Debug for StorageOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=…", self.name)
    }
}

/// Reads a setting. Its errors do not repeat it, as those of clap would: all of it may be a secret.
#[derive(Clone, Copy, Debug)]
struct StorageOptionParser;

impl TypedValueParser for StorageOptionParser {
    type Value = StorageOption;

    fn parse_ref(
        &self,
        command: &clap::Command,
        _: Option<&clap::Arg>,
        text: &OsStr,
    ) -> Result<StorageOption, clap::Error> {
        match text.to_str().and_then(|text| text.split_once('=')) {
            Some((name, value)) if !name.is_empty() => {
                Ok(StorageOption { name: name.to_owned(), value: value.to_owned() })
            }
            _ => {
                let message = "the value of --storage-option has the form NAME=VALUE\n";
                Err(clap::Error::raw(ErrorKind::ValueValidation, message).with_cmd(command))
            }
        }
    }
}
