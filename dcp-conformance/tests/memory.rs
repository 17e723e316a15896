//! The suite for storages on the storage in memory, on the least one, and through the decorators.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dcp_conformance::{
    CountingStorage, FaultStorage, MemoryStorage, SlowStorage, StallStorage, run, storage,
};
use dcp_core::Storage;
use dcp_core::storage::Capabilities;

fn main() -> ExitCode {
    let memory = || Arc::new(MemoryStorage::new());
    let subjects: [(&str, Arc<dyn Storage>); 7] = [
        ("memory", memory()),
        ("conditional", Arc::new(MemoryStorage::new().with_conditional_claims())),
        ("least", Arc::new(MemoryStorage::new().with_capabilities(Capabilities::none()))),
        ("counting", Arc::new(CountingStorage::new(memory()))),
        ("fault", Arc::new(FaultStorage::new(memory()))),
        ("stall", Arc::new(StallStorage::new(memory(), u64::MAX))),
        ("slow", Arc::new(SlowStorage::new(memory(), Duration::from_millis(1)))),
    ];
    let trials = subjects
        .into_iter()
        .flat_map(|(name, subject)| storage::trials(name, || async { subject }));
    run(trials.collect())
}
