//! Jobs on whole checkpoints.

#![allow(clippy::unwrap_used, reason = "test code, though outside of test functions")]

mod callables;
mod damaged;
mod diff;
mod flipped;
mod handmade;
mod jobs;
mod rewrite_metadata;
mod safetensors;
mod stats;
mod support;
mod torch_save;
mod views;
