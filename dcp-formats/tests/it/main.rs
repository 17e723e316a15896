//! Codecs of every format, and their readers and writers.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code, though outside of functions")]

mod archives;
mod blobs;
mod corpus;
mod dcp;
mod harness;
mod hf;
mod metadata;
mod metadata_limits;
mod metadata_megatron;
mod pickles;
mod support;
mod tensors;
mod torch_save;
