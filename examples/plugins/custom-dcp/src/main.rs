//! The `dcp` command with a storage and a format of other crates.

use std::process::ExitCode;
use std::sync::Arc;

use dcp_cli::CommandLine;
use toy_format::ToyFormat;

fn main() -> ExitCode {
    CommandLine::new().storages(opendal_storage::register).format(Arc::new(ToyFormat)).run()
}
