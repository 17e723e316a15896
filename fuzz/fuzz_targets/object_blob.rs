//! Stored objects.

#![no_main]

#[path = "../../dcp-formats/tests/it/support/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::object_blob(bytes));
