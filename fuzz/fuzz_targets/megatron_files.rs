//! `metadata.json`, `integrity.json` and trackers of Megatron, and the names of its objects.

#![no_main]

#[path = "../../dcp-megatron/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::small_files(bytes));
