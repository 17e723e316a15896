//! Targets, and the data written to them.

pub(crate) mod division;
pub(crate) mod on_ranks;
pub(crate) mod rank_writes;
pub(crate) mod reshard;
pub(crate) mod rewrite_metadata;
pub(crate) mod stored_data_source;
pub(crate) mod target;
pub(crate) mod wrapped_tensors;
pub(crate) mod written;

pub use dcp_formats::safetensors::RAW;
pub use rewrite_metadata::{MetadataRewrite, rewrite_metadata};
pub use target::Target;
pub use wrapped_tensors::refuse_rank_parts;
pub use written::{ConversionReport, PlannedTensor, ReplacedClass};
