//! `dcp completions`.

use clap::{Args, Command};
use clap_complete::Shell;

use crate::failure::Failure;
use crate::output::Output;

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

/// Prints the completions of `program`.
pub(crate) fn completions(
    args: &Completions,
    mut program: Command,
    out: &Output,
) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "dcp", &mut script);
    out.write_own(&String::from_utf8_lossy(&script))
}
