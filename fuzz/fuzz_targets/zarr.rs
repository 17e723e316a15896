//! Descriptions of zarr arrays.

#![no_main]

#[path = "../../dcp-formats/tests/support/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::zarr(bytes));
