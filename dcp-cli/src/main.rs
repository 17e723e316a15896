//! The `dcp` command.

use std::process::ExitCode;

use dcp_cli::CommandLine;

fn main() -> ExitCode {
    CommandLine::new().run()
}
