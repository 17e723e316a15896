#![doc = include_str!("../README.md")]
//!
//! Codecs take bytes and return results; they open no files and execute nothing. Readers and
//! writers of whole checkpoints implement [`StorageReader`](dcp_core::StorageReader) and
//! [`StorageWriter`](dcp_core::StorageWriter) over any [`Storage`](dcp_core::Storage).
//!
//! | a checkpoint of | is read by | and written by | feature |
//! |---|---|---|---|
//! | PyTorch DCP | [`dcp::DcpReader`] | [`dcp::DcpWriter`] | `torch-dcp` |
//! | `torch.save` | [`torch_save::TorchSaveReader`] | [`torch_save::write()`] | `torch-save` |
//! | Hugging Face | [`hf::HfReader`] | [`hf::write_folder`] | `hf` |
//! | Megatron-Core's zarr | [`zarr::ZarrReader`] | | `zarr` |
//!
//! | codec | for | feature |
//! |---|---|---|
//! | [`metadata`] | the `.metadata` of DCP | `torch-dcp` |
//! | [`pickle`] | Python's pickle, as data | `torch-save` |
//! | [`torch_zip`] | the archives of `torch.save` | `torch-save` |
//! | [`torch_tensor`], [`torch_object`] | one tensor or object in such an archive | `torch-save` |
//! | [`safetensors`] | files of safetensors | `safetensors` |

#![cfg_attr(
    not(all(feature = "torch-dcp", feature = "hf", feature = "zarr")),
    allow(
        dead_code,
        unused_imports,
        unreachable_pub,
        reason = "formats share code, of which a build without some of them uses a part"
    )
)]

#[cfg(feature = "torch-dcp")]
mod chunk_crcs;
mod chunk_geometry;
mod crc_parts;
#[cfg(feature = "torch-dcp")]
pub mod dcp;
mod expansion;
mod find_incomplete_files;
mod folder_contents;
mod formats;
mod headed_file;
#[cfg(feature = "safetensors")]
mod header_claims;
#[cfg(feature = "hf")]
pub mod hf;
pub mod incomplete_files;
mod indexed_tensors;
mod leftovers;
#[cfg(feature = "torch-dcp")]
pub mod metadata;
mod missing_files;
#[cfg(feature = "torch-save")]
pub mod pickle;
mod placed_reads;
#[cfg(feature = "safetensors")]
pub mod safetensors;
mod staged;
mod stop;
#[cfg(feature = "torch-save")]
pub mod torch_object;
#[cfg(feature = "torch-save")]
pub mod torch_save;
#[cfg(feature = "torch-save")]
pub mod torch_tensor;
#[cfg(feature = "torch-save")]
pub mod torch_zip;
#[cfg(feature = "safetensors")]
mod unique;
mod upload;
#[cfg(feature = "zarr")]
pub mod zarr;

pub use crc_parts::CrcParts;
pub use find_incomplete_files::{find_incomplete_files, find_incomplete_files_where};
pub use formats::formats;
pub use headed_file::prepare_headed_file;
pub use placed_reads::without_transforms;
pub use staged::Staged;
pub use stop::Stop;
#[cfg(feature = "safetensors")]
pub use unique::UniqueMap;
pub use upload::{ByteProgress, FileOptions, PendingFile};
