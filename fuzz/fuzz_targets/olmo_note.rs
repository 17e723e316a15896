//! What OLMo-core's trainer notes about a checkpoint, and the names of its steps.

#![no_main]

#[path = "../../dcp-olmo/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::note(bytes));
