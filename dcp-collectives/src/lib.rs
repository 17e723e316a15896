#![doc = include_str!("../README.md")]

mod call;
mod deadline;
mod local;
mod poison;
mod solo;

pub use deadline::DEFAULT_DEADLINE;
pub use local::{LocalCollective, LocalGroup};
pub use solo::Solo;
