#![doc = include_str!("../README.md")]

mod absent_storage;
mod checkpoint;
mod combine;
mod compare;
mod convert;
mod copy;
mod destination;
mod error;
mod file_job;
mod format;
mod get;
mod held_target;
mod index_files;
mod inspect;
mod keys;
mod load;
mod model_files;
mod new_folders;
mod no_checkpoint;
mod notes;
mod open;
mod open_keys;
mod overlap_guard;
mod refuse_incomplete;
mod refused_links;
mod reshard;
pub mod rollback;
pub mod run;
mod same_place;
mod setters;
mod small_file;
mod step_naming;
mod target;
pub mod text;
mod uri;
mod verify;
mod whole;

pub use checkpoint::opener::{Need, Opener};
pub use checkpoint::{Checkpoint, framework};
pub use combine::{average, merge};
pub use destination::{Destination, cast_to};
pub use error::{Error, ErrorKind, Reasons};
pub use file_job::FileJob;
pub use format::Format;
pub use keys::Keys;
pub use notes::Notes;
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
    pub use crate::verify::Verification;
}
