//! `torch.save` files: one pickle of any object, with its tensors.
//!
//! [`TorchSaveReader`] reads such a file as a checkpoint, from any version of PyTorch and with any
//! classes, and executes nothing.
//!
//! [`write()`] writes one from [`TorchSaveItem`]s: nested dicts and lists as PyTorch's
//! `dcp_to_torch_save` builds them, and for plain data and plain tensors the bytes that PyTorch
//! 2.15 writes, except for the serialization id. It streams: a [`TorchSavePlan`] computes the length
//! of the file before the first byte, and reads each tensor from a
//! [`DataSource`](dcp_core::checkpoint::DataSource) once, front to back. [`TorchSaveReader::again`]
//! lays out a
//! whole file in another form, with every object unchanged.
//! with every object as it is.

mod audit;
mod compose;
mod contents;
mod distributed;
mod file;
mod flatten;
mod format;
mod graphs;
mod index;
mod inflated;
mod legacy;
mod object;
mod persistent;
mod reader;
mod rewrite;
mod strided;
mod structure;
mod tree;
mod value;
mod write;

pub(crate) use contents::check_stream;
pub use contents::{MAGIC_LEN, is_torch_save};
pub use distributed::{DistributedTensor, MeshPlacement, RankDivision, RankMesh};
pub use format::{FILE_ENDINGS, TorchSaveFormat};
pub use graphs::TorchSaveGraphs;
pub use reader::{FileRecord, TorchSaveReader};
pub use rewrite::TorchSaveRewrite;
pub use value::{decode_only_item, encode_value, replace_classes};
pub use write::{
    TorchSaveContent, TorchSaveForm, TorchSaveItem, TorchSaveOptions, TorchSavePlan, write,
};
