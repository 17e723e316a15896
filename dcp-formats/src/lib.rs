#![doc = include_str!("../README.md")]
//!
//! Codecs take bytes and return results; they open no files and execute nothing. Readers and
//! writers of whole checkpoints implement [`StorageReader`](dcp_core::StorageReader) and
//! [`StorageWriter`](dcp_core::StorageWriter) over any [`Storage`](dcp_core::Storage).
//!
//! | a checkpoint of | is read by | and written by |
//! |---|---|---|
//! | PyTorch DCP | [`dcp::DcpReader`] | [`dcp::DcpWriter`] |
//! | `torch.save` | [`torch_save::TorchSaveReader`] | [`torch_save::write()`] |
//! | Hugging Face, safetensors | [`hf::HfReader`] | [`hf::write_folder`], [`safetensors::write()`] |
//! | Megatron-Core's zarr | [`zarr::ZarrReader`] | |
//!
//! | codec | for |
//! |---|---|
//! | [`metadata`] | the `.metadata` of DCP |
//! | [`pickle`] | Python's pickle, as data |
//! | [`torch_zip`] | the archives of `torch.save` |
//! | [`torch_tensor`], [`torch_object`] | one tensor or object in such an archive |

mod chunk_crcs;
mod crc_parts;
pub mod dcp;
mod expansion;
mod find_incomplete_files;
mod folder_contents;
mod formats;
mod headed_file;
mod header_claims;
pub mod hf;
pub mod incomplete_files;
mod indexed_tensors;
mod leftovers;
pub mod metadata;
mod missing_files;
pub mod pickle;
mod placed_reads;
pub mod safetensors;
mod staged;
mod stop;
pub mod torch_object;
pub mod torch_save;
pub mod torch_tensor;
pub mod torch_zip;
mod unique;
mod upload;
pub mod zarr;

pub use crc_parts::CrcParts;
pub use find_incomplete_files::{find_incomplete_files, find_incomplete_files_where};
pub use formats::formats;
pub use headed_file::prepare_headed_file;
pub use placed_reads::without_transforms;
pub use staged::Staged;
pub use stop::Stop;
pub use unique::UniqueMap;
pub use upload::{ByteProgress, FileOptions, PendingFile};
