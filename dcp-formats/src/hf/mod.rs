//! Folders of safetensors files, as Hugging Face models have them.
//!
//! A model is one `model.safetensors`, or `model-00001-of-0000N.safetensors` files with a
//! `model.safetensors.index.json` that gives the file of each tensor ([`IndexFile`]). PyTorch's own
//! Hugging Face storage (2.8 to 2.15) writes the same, and files of each rank's parts, with
//! `DCP_SHARDING_INFO` in their headers and without an index.
//!
//! [`HfReader`] reads all of these, and single files, as a checkpoint. [`find_quantized`] finds
//! block-scaled weights. [`HfLayout`] divides tensors into files, and [`write_folder`] writes them,
//! [`HfRankWriter`] in a save of ranks.

mod audit;
mod complete;
mod consolidate;
mod finding;
mod format;
mod index_file;
mod indexed_files;
mod layout;
mod load;
mod merge;
mod other_program;
mod pending_folder;
mod quantized;
mod rank_writer;
mod reader;
mod replaced;
mod sidecar_files;
mod single;
mod variants;
mod whole_model;
mod write;

pub(crate) use crate::safetensors::ENDING;
pub use crate::safetensors::INDEX_ENDING;
pub use complete::{UNFINISHED_NAME, forgotten_shard};
pub use finding::{Finding, FindingKind};
pub use format::HuggingFaceFormat;
pub use index_file::{INDEX_NAME, IndexFile};
pub(crate) use indexed_files::indexed_tensors;
pub use layout::{HfFile, HfLayout, HfPart, HfPlan, MAX_FILE_BYTES, SINGLE_NAME};
pub use pending_folder::PendingFolder;
pub use quantized::{
    BLOCK, E2M1, QuantError, QuantScheme, Quantized, config_with_dtype,
    config_without_quantization, configured_block, configured_method, find_quantized, names_scales,
};
pub use rank_writer::{HfRankWriter, HfRankWriterBuilder};
pub use reader::{HfReader, HfReaderBuilder};
pub use sidecar_files::{CONFIG_ASIDE, CONFIG_NAME};
pub use whole_model::{Weights, has_variants, model_is_whole};
pub use write::{
    ChosenFolder, HfWriteOptions, HfWritten, choose_folder, file_byte_lens, prepare_folder,
    refuse_existing, write_folder,
};
