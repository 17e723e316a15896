//! Whole files of `torch.save`.

#![no_main]

#[path = "../../dcp-formats/tests/it/support/torch_save_target.rs"]
mod torch_save_target;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| torch_save_target::torch_save(bytes));
