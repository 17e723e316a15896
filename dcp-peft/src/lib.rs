#![doc = include_str!("../README.md")]

mod adapted;
mod adapter_config;
mod changes;
mod factors;
mod format;
mod framework;
mod lengths;
mod numbers;
mod product;

pub use adapted::Adapted;
pub use adapter_config::{AdapterConfig, CONFIG_NAME};
pub use format::{PeftFormat, WEIGHTS_NAME};
pub use framework::{AdapterOptions, Peft};
