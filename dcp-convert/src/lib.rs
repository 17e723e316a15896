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
//! is complete. [`JobOptions`] bound memory, report progress, and turn a job into a dry run.

mod cast;
mod element;
mod error;
mod foreign_callable;
mod integrity;
mod job;
mod jobs;
mod keys;
mod open;
mod read;
mod source;
pub mod view;
mod write;

pub use cast::{
    CastCounts, CastError, CastOptions, CastReport, Caster, TensorCast, is_exact, is_float,
};
pub use dcp_formats::safetensors::RAW;
pub use element::compare::Tolerance;
pub use element::npy::{NpyType, npy_header, npy_type};
pub use element::slice::TensorSlice;
pub use element::value_json::{JsonLimits, ValueEncoder, value_json};
pub use element::{Element, decode};
pub use error::ConvertError;
pub use foreign_callable::ForeignCallable;
pub use integrity::callables::{admit_callables, foreign_callables};
pub use integrity::checked_source::{CheckedSource, Verified};
pub use integrity::problem::{Problem, ProblemKind};
pub use job::{JobOptions, JobProgress, MIN_MEMORY};
pub use jobs::diff::{
    Described, DiffCounts, DiffOptions, DiffReport, DiffScope, Difference, DifferenceKind, Spot,
    ValueDifference, diff,
};
pub use jobs::get::{Found, FoundTensor, find, object_to_torch_save};
pub use jobs::inspect::{ChunkSummary, KeySummary, Summary, TensorSummary, inspect};
pub use jobs::report;
pub use jobs::stats::{
    BAD_CHUNKS_MAX, BAD_VALUES_MAX, BadChunk, BadValue, FloatRange, Histogram, Number, NumberStats,
    ObjectStats, StatsReport, TensorStats, stats,
};
pub use jobs::verify::{VerifyReport, verify};
pub use keys::rename::Rename;
pub use keys::select::{Chosen, Selection, StatePart, parse_mapping};
pub use keys::suggest::unknown_fqn;
pub use keys::unmatched::{UnmatchedPattern, unmatched_patterns};
pub use open::formats::formats;
pub use open::list_run::{EntryKind, RunEntry, RunListing, list_run};
pub use read::objects::{ObjectResult, read_object, read_objects};
pub use read::tensor_read::TensorReader;
pub use source::Source;
pub use write::division::{Division, Held, Owner};
pub use write::reshard::{MAX_RANKS, divide, reshard};
pub use write::rewrite_metadata::{MetadataRewrite, ProfileChoice, rewrite_metadata};
pub use write::safetensors_items::LEFT_OUT;
pub use write::target::Target;
pub use write::to_hf::{to_hf, to_hf_with};
pub use write::to_safetensors::to_safetensors;
pub use write::to_torch_save::to_torch_save;
pub use write::written::{ConversionReport, PlannedTensor, ReplacedClass};
