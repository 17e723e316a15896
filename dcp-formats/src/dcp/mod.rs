//! PyTorch's distributed checkpoints (DCP): a directory of `.distcp` files and a `.metadata`.
//!
//! [`DcpWriter`] and [`DcpReader`] implement dcp-core's contracts over any
//! [`Storage`](dcp_core::Storage), in both directions with PyTorch 2.1 to 2.15.

mod audit;
mod by_rank;
mod commit;
mod compression;
mod files;
mod format;
mod index;
mod merge;
pub(crate) mod names;
mod place;
mod reader;
mod replica_equality;
mod safetensors_files;
mod sidecar;
mod split;
mod wrapped;
mod write;
mod writer;
#[cfg(feature = "zstd")]
mod zstd_encoder;

pub use crate::chunk_crcs::ChunkCrcs;
pub use crate::missing_files::EXAMINED_INDEX_MAX;
pub use by_rank::Differing;
pub use commit::{claim, remove_unreferenced, replace_metadata, sidecar_of};
pub use files::DcpFiles;
pub use format::{DcpFormat, is_part_folder};
pub use names::data_file;
pub use reader::{DcpReader, DcpReaderBuilder};
pub use sidecar::{Sidecar, SidecarFile};
pub use split::FileLayout;
pub use wrapped::shows_wrapped;
pub use write::prepare_tensor_file;
pub use writer::{DcpWriter, DcpWriterBuilder};
#[cfg(feature = "zstd")]
pub use zstd_encoder::Zstd;
