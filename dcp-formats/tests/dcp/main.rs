//! PyTorch's layout over a storage in memory: real checkpoints in, own checkpoints in and out,
//! and everything that can go wrong on the way.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code, though outside of functions")]

mod crash;
mod damage;
mod fixtures;
mod harness;
mod hostile;
mod olmo;
mod ranges;
mod rank_local;
mod roundtrip;
mod safetensors;
mod savers;
#[path = "../support/mod.rs"]
mod support;
