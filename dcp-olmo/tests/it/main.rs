//! On checkpoints that OLMo-core 3.0 wrote, and on our own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code, though outside of functions")]

mod corpus;
mod keys;
mod layouts;
mod loading;
mod overwrite;
mod run_dir;
mod support;
mod targets;
mod unshard;
