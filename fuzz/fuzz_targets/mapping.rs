//! Declarations of mappings between naming schemes.

#![no_main]

#[path = "../../dcp-mapping/tests/it/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::mapping(bytes));
