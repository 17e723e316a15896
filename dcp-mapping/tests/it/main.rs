//! Mappings on whole models, against slow and plain references.

#![allow(clippy::unwrap_used, reason = "test code, though outside of test functions")]

mod declarations;
mod families;
mod fixtures;
mod incompatibilities;
mod large;
mod misfits;
mod model;
mod mutations;
mod options;
mod original_config;
mod recognition;
mod reference;
mod run_config;
mod support;
mod targets;
mod torchtitan;
