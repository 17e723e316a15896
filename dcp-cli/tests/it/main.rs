//! The real binary on real checkpoints.

mod convert;
mod damaged;
mod get;
mod inspect;
mod look;
mod reshard;
mod support;
mod values;
mod wrong_input;
