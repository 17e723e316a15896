//! The `dcp` command.

use std::ffi::OsString;
use std::process::ExitCode;

use pyo3::prelude::*;

/// Runs the command with these arguments, of which the first is the name of the program, and returns its exit code.
///
/// Python's handler of SIGINT runs in the interpreter alone, which the command does not enter. The caller restores the
/// default one before, so that the command has its own.
#[pyfunction]
pub(crate) fn run_command(py: Python<'_>, args: Vec<OsString>) -> u8 {
    let code = py.detach(|| dcp_cli::CommandLine::new().run_with(args));
    (0..=u8::MAX).find(|number| ExitCode::from(*number) == code).unwrap_or(1)
}
