//! Targets, and the data written to them.

pub(crate) mod division;
pub(crate) mod on_ranks;
pub(crate) mod rank_writes;
pub(crate) mod reshard;
pub(crate) mod rewrite_metadata;
pub(crate) mod safetensors_items;
pub(crate) mod stored_data_source;
pub(crate) mod target;
pub(crate) mod to_hf;
pub(crate) mod to_safetensors;
pub(crate) mod to_torch_save;
pub(crate) mod wrapped_tensors;
pub(crate) mod written;

pub use dcp_formats::safetensors::RAW;
pub use division::{Division, Held, Owner};
pub use reshard::MAX_RANKS;
pub use rewrite_metadata::{IndexReader, MetadataRewrite, ProfileChoice};
pub use safetensors_items::LEFT_OUT;
pub use written::{PlannedTensor, ReplacedClass};
