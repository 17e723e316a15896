#![doc = include_str!("../README.md")]
//!
//! A [`Source`] is a checkpoint of any format. A [view] is a source that changes others:
//! chosen keys ([`Selection`]), other dtypes, averages, other shapes. Every job reads a source:
//!
//! | to | |
//! |---|---|
//! | look | [`inspect()`], [`list_run()`], [`find()`], [`stats()`], [`report`] |
//! | judge | [`verify()`], [`diff()`] |
//! | write | [`to_safetensors()`], [`to_hf()`], [`to_torch_save()`], [`reshard()`], [`rewrite_metadata()`] |
//!
//! A job reads every byte once and compares it with its checksum. A target becomes visible when it
//! is complete. [`JobOptions`] bound memory, report progress, turn a job into a dry run, and share it
//! among the processes of a [group].

pub mod cast;
pub mod element;
mod error;
mod foreign_callable;
pub mod group;
pub mod integrity;
pub mod job;
pub mod jobs;
pub mod keys;
pub mod open;
pub mod read;
mod source;
mod unmatched_pattern;
pub mod view;
pub mod write;

pub use error::ConvertError;
pub use integrity::checked_source::{CheckedSource, Verified};
pub use job::{JobOptions, JobProgress};
pub use jobs::diff::diff;
pub use jobs::get::find;
pub use jobs::inspect::inspect;
pub use jobs::report;
pub use jobs::stats::stats;
pub use jobs::verify::verify;
pub use keys::select::Selection;
pub use open::formats::formats;
pub use open::list_run::list_run;
pub use source::Source;
pub use write::reshard::{divide, reshard};
pub use write::rewrite_metadata::rewrite_metadata;
pub use write::target::Target;
pub use write::to_hf::{to_hf, to_hf_with};
pub use write::to_safetensors::to_safetensors;
pub use write::to_torch_save::to_torch_save;
pub use write::wrapped_tensors::refuse_rank_parts;
pub use write::written::ConversionReport;
