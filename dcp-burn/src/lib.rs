#![doc = include_str!("../README.md")]

mod adam;
mod error;
mod model;
mod tensor;

pub use adam::BurnAdam;
pub use error::BurnError;
pub use model::BurnModel;
