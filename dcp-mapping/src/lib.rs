#![doc = include_str!("../README.md")]
//!
//! # Views
//!
//! [`map_to_hf`] and [`map_to_megatron`] make a [`Source`](dcp_jobs::Source) that any job of
//! [`dcp_jobs`] reads. Nothing is copied before that, and only what is being read is held in
//! memory. A [`Mapping`] serves both directions.

mod config;
mod conversion;
mod declaration;
mod error;
mod facts;
mod layout;
mod map;
mod mapping;
mod recognize;
mod template;

pub use conversion::{Architecture, FamilyMapping, MappingOptions};
pub use error::MappingError;
pub use facts::{Facts, Padding};
pub use map::options::{Direction, LayerForm, LayerSpec, MapOptions, Tying};
pub use map::{Mapped, MappingReport, map_to_hf, map_to_megatron};
pub use mapping::Mapping;
pub use recognize::{Recognition, recognize, recognize_among, recognize_config};
