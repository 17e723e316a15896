#![doc = include_str!("../README.md")]

mod adapted;
mod adapter_config;
mod blocks;
mod changes;
mod factors;
mod format;
mod framework;
mod lengths;
mod numbers;
mod orientation;
mod product;
mod ties;

pub use adapted::{Adapted, MergeSummary};
pub use adapter_config::{AdapterConfig, CONFIG_NAME};
pub use format::{PeftFormat, WEIGHTS_NAME};
pub use framework::{AdapterOptions, Peft};
