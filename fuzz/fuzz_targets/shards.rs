//! What ranks say about their shards.

#![no_main]

#[path = "../../dcp-megatron/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::shards(bytes));
