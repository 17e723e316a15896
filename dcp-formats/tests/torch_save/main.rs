//! Files of `torch.save`: what real PyTorch wrote is read bit for bit, what is written here is
//! what PyTorch would have written, and hostile files do no harm.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code, though outside of functions")]

mod fixtures;
#[path = "../dcp/harness.rs"]
#[allow(dead_code, reason = "shared with the tests of PyTorch's layout")]
mod harness;
mod hostile;
mod reading;
mod regions;
mod rewrite;
#[path = "../support/mod.rs"]
mod support;
mod writing;
