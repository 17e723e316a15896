//! Pickles as the common state of a checkpoint of Megatron-Core.

#![no_main]

#[path = "../../dcp-megatron/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::common_state(bytes));
