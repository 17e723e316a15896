//! The suite for formats on the toy format.

use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::format::{self, Subject};
use toy_format::{ToyFormat, ToyWriter};

fn main() -> ExitCode {
    let toy = Subject::with_writer(Arc::new(ToyFormat), |storage, overwrite| {
        Arc::new(ToyWriter::new(storage, overwrite))
    });
    format::main("toy", toy.checksums().index_checksum())
}
