//! Index files of Hugging Face models and PyTorch's sharding info.

#![no_main]

#[path = "../../dcp-formats/tests/it/support/targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::hf_index(bytes));
