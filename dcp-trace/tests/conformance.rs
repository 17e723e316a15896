//! Every clause of `Storage`, on a storage whose requests are recorded.
#![allow(clippy::unwrap_used, reason = "tests fail loudly")]

use std::process::ExitCode;
use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_conformance::storage::trials;
use dcp_trace::TraceRecorder;

fn main() -> ExitCode {
    let recorder = TraceRecorder::to(std::io::sink());
    let open = move || {
        let storage = recorder.storage(0, Arc::new(MemoryStorage::default()));
        async move { storage }
    };
    dcp_conformance::run(trials("traced", open))
}
