//! safetensors files: a JSON header that says where each tensor's bytes lie, then the bytes.
//!
//! [`Header`] is parsed from untrusted bytes and made for writing without touching a file;
//! [`write`](fn@write) streams a whole file to a storage. PyTorch's DCP uses the format in files
//! of `SerializationFormat.SAFETENSORS` and of its Hugging Face writer.

mod dtype;
mod encode;
mod header;
mod image;
mod raw;
mod sharding;
mod tied;
mod write;

pub use dtype::{dtype_name, parse_dtype};
pub use encode::{EncodedHeader, SafetensorsItem, encode_header};
pub use header::{Header, PREFIX_LEN, TensorInfo, header_len};
pub(crate) use header::{RangeProblem, Ranges};
pub(crate) use image::{Image, read_image};
pub use raw::{RAW, RawTypes};
pub use sharding::{SHARDING, SHARDING_VERSION, SHARDING_VERSION_WRITTEN, ShardingInfo};
pub use tied::{TIED, ties_of};
pub(crate) use write::send;
pub use write::{prepare, write};
