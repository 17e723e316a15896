//! Adapters of PEFT: read, merged and refused.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code, though outside of functions")]

mod merge;
mod other_jobs;
mod support;
mod ties;
