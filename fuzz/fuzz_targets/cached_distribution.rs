//! Distributions of a save that a later process finds on disk.

#![no_main]

#[path = "../../dcp-megatron/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::cached_distribution(bytes));
