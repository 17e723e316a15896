//! Files of `torch.save`: one pickle of anything, with the tensors in it.
//!
//! [`TorchSaveReader`] reads such a file as a checkpoint, whatever version of PyTorch wrote it
//! and whatever classes are in it; nothing of it is executed.
//!
//! [`write()`] makes one of [`TorchSaveItem`]s: nested dicts and lists as PyTorch's
//! `dcp_to_torch_save` makes them, in the bytes that PyTorch 2.15 would write for plain data and
//! plain tensors, but for the serialization id. It streams: a [`TorchSavePlan`] knows the length
//! of the file before the first byte, and asks a [`DataSource`](dcp_core::DataSource) for each
//! tensor once, front to back. [`TorchSaveReader::again`] lays out a whole file in another form,
//! with every object as it is.

mod compose;
mod contents;
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

pub use contents::{MAGIC_LEN, is_torch_save};
pub use format::{FILE_ENDINGS, TorchSaveFormat};
pub use graphs::TorchSaveGraphs;
pub use reader::{FileRecord, TorchSaveReader};
pub use rewrite::TorchSaveRewrite;
pub use value::{decode_only_item, encode_value, replace_classes};
pub use write::{
    TorchSaveContent, TorchSaveForm, TorchSaveItem, TorchSaveOptions, TorchSavePlan, write,
};
