//! The suite for formats on those of this crate.

use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::format::{Subject, trials};
use dcp_conformance::run;
use dcp_formats::dcp::{DcpFormat, DcpWriter};

fn main() -> ExitCode {
    let dcp = Subject::with_writer(Arc::new(DcpFormat), |storage, overwrite| {
        Arc::new(DcpWriter::builder(storage).overwrite(overwrite).build())
    });
    run(trials("dcp", dcp.with_checksums()))
}
