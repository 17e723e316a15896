//! Declarative mappings of model weights between Megatron-Core's naming scheme and Hugging Face's,
//! as streaming views of a checkpoint.
//!
//! A [`Mapping`] is read from TOML: rules that say which Megatron tensor is which tensors of
//! transformers, and what is done between them (see the README beside this crate, and its
//! `families/`). One mapping serves both directions. [`map_to_hf`] and [`map_to_megatron`] make a
//! [`Source`](dcp_convert::Source) that any job of [`dcp_convert`] reads; nothing is copied before
//! that, and nothing is held but what is being read.
//!
//! ```no_run
//! use dcp_convert::{JobOptions, Source};
//! use dcp_mapping::{Facts, MapOptions, Mapping, map_to_hf, map_to_megatron, recognize_config};
//!
//! # async fn example(megatron: Source, args: dcp_core::Dict, hf: Source) ->
//! #     Result<(), Box<dyn std::error::Error>> {
//! # let config_json = "";
//! // From Megatron, by the arguments in the checkpoint.
//! let (job, options) = (JobOptions::default(), MapOptions::default());
//! let mapping = Mapping::builtin("llama")?;
//! let mapped = map_to_hf(&megatron, &mapping, &Facts::from_dict(&args), &options, &job).await?;
//! let config = mapping.config_json(&mapped.facts)?;
//!
//! // And to it, by `config.json`.
//! let config = serde_json::from_str(config_json)?;
//! let mapping = recognize_config(&config)?;
//! let facts = mapping.facts_of_config(&config)?;
//! let mapped = map_to_megatron(&hf, &mapping, &facts, &options, &job).await?;
//! # Ok(())
//! # }
//! ```

mod config;
mod declaration;
mod error;
mod facts;
mod layout;
mod map;
mod mapping;
mod recognize;
mod template;

pub use error::MappingError;
pub use facts::{Facts, Padding};
pub use map::options::{Direction, LayerForm, LayerSpec, MapOptions, Tying};
pub use map::{Mapped, MappingReport, map_to_hf, map_to_megatron};
pub use mapping::Mapping;
pub use recognize::{Recognition, recognize, recognize_among, recognize_config};
