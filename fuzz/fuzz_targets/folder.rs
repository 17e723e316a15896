//! Names of files in the folders of runs: what each format recognizes.

#![no_main]

#[path = "../../dcp-formats/tests/it/support/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::folder(bytes));
