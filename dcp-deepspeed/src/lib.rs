#![doc = include_str!("../README.md")]

mod assemble;
mod checkpoint;
mod error;
mod file_name;
mod file_set;
mod flat;
mod format;
mod framework;
mod model_states;
mod opened;
mod optimizer;
mod parameter;
mod rank_file;
mod rank_optimizer;
mod rounding;
mod universal;
mod zero3;

pub use checkpoint::{DeepSpeedCheckpoint, DeepSpeedDescription};
pub use format::DeepSpeedFormat;
pub use framework::DeepSpeed;
