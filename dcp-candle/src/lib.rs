#![doc = include_str!("../README.md")]

mod adamw;
mod error;
mod memory;
mod model;
mod sgd;
mod tensor;

pub use adamw::AdamW;
pub use error::CandleError;
pub use model::VarMapModel;
pub use sgd::Sgd;
pub use tensor::{from_candle, shard_from_candle, to_candle};
