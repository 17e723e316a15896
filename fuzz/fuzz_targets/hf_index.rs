//! Index files of Hugging Face models and PyTorch's sharding info.

#![no_main]

#[path = "../../dcp-formats/tests/support/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::hf_index(bytes));
