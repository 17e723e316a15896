//! `.dcp-commit`, the record of an overwrite of a Megatron checkpoint that did not finish.

#![no_main]

#[path = "../../dcp-megatron/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::commit_record(bytes));
