//! The suite for storages on the storage in memory, on the least one, and through the decorators.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dcp_conformance::{
    CountingStorage, FaultStorage, MemoryStorage, SlowStorage, StallStorage, WebStorage, run,
    storage,
};
use dcp_core::Storage;
use dcp_core::storage::Capabilities;

fn main() -> ExitCode {
    let memory = || Arc::new(MemoryStorage::new());
    let mut least = Capabilities::none();
    least.writable = true;
    least.listable = true;
    let mut limited = MemoryStorage::new().capabilities();
    limited.write_limits.put_bytes_max = 24 << 20;
    limited.write_limits.part_bytes_min = 300;
    limited.write_limits.part_bytes_max = 8 << 20;
    let with = |capabilities| Arc::new(MemoryStorage::new().with_capabilities(capabilities));
    let subjects: [(&str, Arc<dyn Storage>); 9] = [
        ("memory", memory()),
        ("conditional", Arc::new(MemoryStorage::new().conditional_claims())),
        ("least", with(least)),
        ("limited", with(limited)),
        ("web", Arc::new(WebStorage::new(memory()))),
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
