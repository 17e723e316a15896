//! Checkpoints of Megatron-Core, real ones and our own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail loudly")]

mod support;
mod writer;
