//! Trace files, which other programs may have written.

#![no_main]

#[path = "../../dcp-trace/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::trace(bytes));
