//! Offline jobs on whole checkpoints: inspect, verify, extract, convert, reshard.

mod check;
mod data;
mod deep;
mod element;
mod error;
mod get;
mod inspect;
mod job;
mod npy;
mod numpy;
mod objects;
mod placed;
mod print;
mod reshard;
mod runs;
mod safetensors_file;
mod slice;
mod suggest;
mod target;
mod tensor_read;
mod to_safetensors;
mod value_json;
mod verify;

pub use element::{Element, decode};
pub use error::ConvertError;
pub use get::{Found, FoundTensor, find};
pub use inspect::{ChunkSummary, KeySummary, Summary, TensorSummary, inspect};
pub use job::{JobOptions, MIN_MEMORY, Progress, Source};
pub use npy::{NpyType, npy_header, npy_type};
pub use reshard::{MAX_RANKS, ReshardReport, reshard};
pub use safetensors_file::SafetensorsFile;
pub use slice::TensorSlice;
pub use target::Target;
pub use to_safetensors::{LEFT_OUT, RAW, SafetensorsReport, to_safetensors};
pub use value_json::{JsonLimits, value_json};
pub use verify::{Problem, ProblemKind, VerifyReport, verify};
