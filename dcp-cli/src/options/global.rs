//! Options of every command.

use clap::Args;

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
