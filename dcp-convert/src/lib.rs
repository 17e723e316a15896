//! Offline jobs on whole checkpoints, in bounded memory: inspect, verify, extract, compare,
//! convert, reshard.
//!
//! A [`Source`] is a checkpoint of any format. [Views](view) show one or several differently:
//! chosen keys ([`Selection`]), other dtypes, averages, other shapes; a view is a source, too.
//! Jobs take sources:
//!
//! | to | |
//! |---|---|
//! | look | [`inspect()`], [`list_run()`], [`find()`], [`stats()`], [`report`] |
//! | judge | [`verify()`], [`diff()`] |
//! | write | [`to_safetensors()`], [`to_hf()`], [`to_torch_save()`], [`reshard()`], [`rewrite_metadata()`] |
//!
//! Every byte is read once and compared with its checksum on the way, and a target appears when
//! it is complete. [`JobOptions`] bound memory, tell progress, and make a job a dry run.
//!
//! ```
//! # use std::sync::Arc;
//! use dcp_convert::{JobOptions, Selection, Source, StatePart, Target, to_safetensors};
//! use dcp_core::{Key, Storage};
//!
//! # async fn example(from: Arc<dyn Storage>, to: Arc<dyn Storage>) ->
//! #     Result<(), Box<dyn std::error::Error>> {
//! // Whatever is in the folder: PyTorch DCP, a file of torch.save, Hugging Face, …
//! let source = Source::open(&from, false).await?;
//! let job = JobOptions::default().with_max_memory(256 << 20);
//!
//! let model = Selection::all().of_part(StatePart::Model).apply(&source, &job).await?;
//! let target = Target::new(to, Key::new("model.safetensors")?);
//! let report = to_safetensors(&model, &target, &job).await?;
//! println!("{} tensors", report.tensors);
//! # Ok(())
//! # }
//! ```

mod archive_audit;
mod callables;
mod cast;
mod check;
mod checked_source;
mod chunk_index;
mod completeness;
mod decode_cache;
mod diff;
mod division;
mod element;
mod error;
mod foreign_callable;
mod get;
mod groups;
mod incremental_crc;
mod inspect;
mod job;
mod list_run;
mod npy;
mod numbers;
mod numpy;
mod objects;
mod part;
mod pieces;
mod place;
mod print;
mod problem;
mod refuse_damaged;
mod rename;
pub mod report;
mod reshard;
mod rewrite_metadata;
mod runs;
mod safetensors_items;
mod select;
mod slice;
mod source;
mod stats;
mod stored_data_source;
mod stored_items;
mod subfolder;
mod suggest;
mod target;
mod tensor_read;
mod to_hf;
mod to_safetensors;
mod to_torch_save;
mod torch_save_audit;
mod unmatched;
mod value_json;
mod verify;
pub mod view;
mod written;

pub use callables::{admit_callables, foreign_callables};
pub use cast::{
    CastCounts, CastError, CastOptions, CastReport, Caster, TensorCast, is_exact, is_float,
};
pub use checked_source::{CheckedSource, Verified};
pub use dcp_formats::safetensors::RAW;
pub use diff::{
    Described, DiffCounts, DiffOptions, DiffReport, DiffScope, Difference, DifferenceKind, Spot,
    Tolerance, ValueDifference, diff,
};
pub use division::{Division, Held, Owner};
pub use element::{Element, decode};
pub use error::ConvertError;
pub use foreign_callable::ForeignCallable;
pub use get::{Found, FoundTensor, find, object_to_torch_save};
pub use inspect::{ChunkSummary, KeySummary, Summary, TensorSummary, inspect};
pub use job::{JobOptions, MIN_MEMORY, Progress};
pub use list_run::{EntryKind, RunEntry, RunListing, list_run};
pub use npy::{NpyType, npy_header, npy_type};
pub use objects::{ObjectResult, read_object, read_objects};
pub use problem::{Problem, ProblemKind};
pub use rename::Rename;
pub use reshard::{MAX_RANKS, divide, reshard};
pub use rewrite_metadata::{MetadataRewrite, ProfileChoice, rewrite_metadata};
pub use safetensors_items::LEFT_OUT;
pub use select::{Chosen, Selection, StatePart, parse_mapping};
pub use slice::TensorSlice;
pub use source::Source;
pub use stats::{
    BAD_CHUNKS_MAX, BAD_VALUES_MAX, BadChunk, BadValue, FloatRange, Histogram, Number, NumberStats,
    ObjectStats, StatsReport, TensorStats, stats,
};
pub use subfolder::Subfolder;
pub use suggest::unknown_fqn;
pub use target::Target;
pub use tensor_read::TensorReader;
pub use to_hf::{to_hf, to_hf_with};
pub use to_safetensors::to_safetensors;
pub use to_torch_save::to_torch_save;
pub use unmatched::{UnmatchedPattern, unmatched_patterns};
pub use value_json::{JsonLimits, ValueEncoder, value_json};
pub use verify::{VerifyReport, verify};
pub use written::{PlannedTensor, ReplacedClass, WriteReport};
