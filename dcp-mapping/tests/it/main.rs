//! Mappings on whole models, against slow and plain references.

#![allow(clippy::unwrap_used, reason = "test code, though outside of test functions")]

mod declarations;
mod express;
mod families;
mod fixtures;
mod large;
mod misfits;
mod model;
mod mutations;
mod options;
mod recognition;
mod reference;
mod support;
mod targets;
