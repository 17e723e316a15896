//! safetensors files: a JSON header with the range of each tensor, and the tensors' bytes.
//!
//! [`Header`] is parsed from untrusted bytes, and built for writing, without file access.
//! [`write`](fn@write) streams a whole file to a storage. PyTorch's DCP uses the format for
//! `SerializationFormat.SAFETENSORS` and in its Hugging Face writer.

mod dtype;
mod encode;
mod header;
mod image;
#[cfg(feature = "safetensors-crate")]
mod library;
mod raw;
mod sharding;
mod tied;
mod write;

pub use dtype::{dtype_name, parse_dtype};
pub use encode::{EncodedHeader, SafetensorsItem, encode_header};
pub(crate) use header::{Discontinuity, RangeProblem, Ranges, RawTensor, contiguous_end};
pub use header::{Header, PREFIX_LEN, TensorInfo, header_len};
pub(crate) use image::{Image, read_image};
#[cfg(feature = "safetensors-crate")]
pub use library::{LibraryTensor, from_safetensors, to_safetensors};
pub use raw::{RAW, RawTypes};
pub use sharding::{SHARDING, SHARDING_VERSION, SHARDING_VERSION_WRITTEN, ShardingInfo};
pub use tied::{TIED, ties_of};
pub(crate) use write::send;
pub use write::{prepare, write};

/// The ending of safetensors files.
pub(crate) const ENDING: &str = ".safetensors";
/// The ending of the names of index files, which list the tensors of several files.
pub const INDEX_ENDING: &str = ".safetensors.index.json";
