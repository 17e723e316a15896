//! Folders of safetensors files over a storage in memory: those of PyTorch's Hugging Face storage
//! in, own ones in and out, and everything that can be wrong with them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code, though outside of functions")]

mod damage;
mod folder;
#[path = "../dcp/harness.rs"]
#[allow(dead_code, reason = "shared with the tests of PyTorch's own layout")]
mod harness;
mod read;
mod roundtrip;
#[path = "../support/mod.rs"]
mod support;
mod write;
