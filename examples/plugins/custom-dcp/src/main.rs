//! The `dcp` command with a storage, a format and a framework of other crates.

use std::process::ExitCode;
use std::sync::Arc;

use dcp_cli::CommandLine;
use toy_format::ToyFormat;
use toy_framework::Toy;

fn main() -> ExitCode {
    CommandLine::new()
        .storages(opendal_storage::register)
        .format(Arc::new(ToyFormat))
        .framework(Arc::new(Toy))
        .run()
}
