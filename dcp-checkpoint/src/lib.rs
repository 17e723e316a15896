#![doc = include_str!("../README.md")]

mod absent_storage;
mod checkpoint;
mod combine;
mod compare;
mod convert;
mod copy;
mod destination;
mod error;
mod format;
mod get;
mod held_target;
mod index_files;
mod inspect;
mod keys;
mod load;
mod mapping;
mod mapping_options;
mod megatron_target;
mod model_files;
mod new_folders;
mod no_checkpoint;
mod notes;
mod open;
mod open_keys;
mod opener;
mod optimizer;
mod overlap_guard;
mod refuse_incomplete;
mod refused_links;
mod reshard;
pub mod rollback;
pub mod run;
mod run_config;
mod same_place;
mod setters;
mod small_file;
mod target;
pub mod text;
mod unshard;
mod uri;
mod verify;
mod whole;

pub use checkpoint::Checkpoint;
pub use combine::{average, merge};
pub use destination::{Destination, cast_to};
pub use error::{Error, ErrorKind};
pub use format::Format;
pub use keys::Keys;
pub use mapping_options::{Architecture, MappingOptions};
pub use megatron_target::MegatronTarget;
pub use opener::{Need, Opener, default_formats};
pub use optimizer::{OptimizerForm, OptimizerOptions};
pub use rollback::Rollback;
pub use small_file::read_at_most;
pub use target::{TargetFile, TargetOptions};

/// The jobs that [`Checkpoint`] starts, and their results.
pub mod jobs {
    pub use crate::combine::{Average, AverageWritten, Merge};
    pub use crate::compare::{Comparison, Statistics};
    pub use crate::convert::{Conversion, Written};
    pub use crate::copy::Copying;
    pub use crate::get::{Item, Lookup, SavedItem};
    pub use crate::inspect::{Inspected, Inspection};
    pub use crate::load::Loading;
    pub use crate::reshard::Resharding;
    pub use crate::unshard::Unsharding;
    pub use crate::verify::Verification;
}
