//! `dcp help`.

use clap::{Args, Command};
use dcp::core::text::Quoted;

use crate::failure::{Exit, Failure};
use crate::output::Output;

/// Print the help of dcp, or of a command.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp help
  dcp help convert")]
pub(crate) struct Help {
    /// The command.
    pub(crate) command: Option<String>,
}

/// Prints the help of `program`, or of one of its commands.
pub(crate) fn help(args: &Help, mut program: Command, out: &Output) -> Result<(), Failure> {
    program.build();
    let found = match &args.command {
        None => Some(&mut program),
        Some(name) => program.find_subcommand_mut(name),
    };
    let Some(command) = found else {
        let name = args.command.as_deref().unwrap_or_default();
        return Err(Failure::new(Exit::Usage, format!("there is no command {}", Quoted(name)))
            .hint("`dcp help` lists the commands"));
    };
    out.write_own(&command.render_long_help().to_string())
}
