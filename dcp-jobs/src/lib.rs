#![doc = include_str!("../README.md")]
//!
//! # Floors
//!
//! 1. *Sources.* A [`Source`] is a checkpoint of any format. A [view] is a source that changes others: chosen
//!    keys ([`Selection`]), other dtypes, averages, other shapes. [`read`], [`element`], [`keys`],
//!    [`integrity`], [`write`](mod@write) and [`listing`] are what jobs on sources are made of.
//! 2. *The door.* An [`Opener`] finds out what is at a URL; a [`Checkpoint`] is a source with its URL, its
//!    notes and the [frameworks](framework) that add to it.
//! 3. *Jobs*, one module each: [`inspect`], [`verify`], [`get`], [`diff`], [`stats`], [`report`], [`convert`],
//!    [`combine`], [`reshard`], [`copy`], [`load`], [`run`]. Each has a builder, which a method of
//!    [`Checkpoint`] starts, over a function of a source.
//!
//! A job reads every byte once and compares it with its checksum. A target becomes visible when it is complete.
//! [`JobOptions`] bound memory, report progress, turn a job into a dry run, and share it among the processes
//! of a [group].

pub mod cast;
pub mod element;
mod error;
pub mod group;
pub mod integrity;
pub mod keys;
pub mod listing;
pub mod options;
pub mod read;
mod source;
pub mod view;
pub mod write;

mod checkpoint;
mod place;
pub mod rollback;

pub mod combine;
pub mod convert;
pub mod copy;
pub mod diff;
mod file_job;
pub mod get;
pub mod inspect;
pub mod load;
pub mod report;
pub mod reshard;
pub mod run;
pub mod stats;
pub mod verify;

pub use checkpoint::chosen_keys::Keys;
pub use checkpoint::format::Format;
pub use checkpoint::notes::Notes;
pub use checkpoint::opener::{Need, Opener};
pub use checkpoint::small_file::read_at_most;
pub use checkpoint::{Checkpoint, framework, text};
pub use convert::destination::{Destination, cast_to};
pub use error::{Error, ErrorKind, JobError, Reasons};
pub use file_job::FileJob;
pub use keys::select::Selection;
pub use options::JobOptions;
pub use place::target::{TargetFile, TargetOptions};
pub use rollback::Rollback;
pub use source::Source;
