//! Archives of `torch.save`.

#![no_main]

#[path = "../../dcp-formats/tests/it/support/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::torch_zip(bytes));
