//! Mappings on whole models, against slow and plain references.

#![allow(clippy::unwrap_used, reason = "test code, though outside of test functions")]

mod families;
mod fixtures;
mod model;
mod reference;
mod support;
