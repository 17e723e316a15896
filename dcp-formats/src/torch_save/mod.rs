//! Files of `torch.save`: one pickle of anything, with the tensors in it.
//!
//! [`TorchSaveReader`] reads such a file as a checkpoint, whatever version of PyTorch wrote it
//! and whatever classes are in it; nothing of it is executed.

mod contents;
mod file;
mod flatten;
mod index;
mod legacy;
mod object;
mod reader;
mod strided;

pub use contents::{MAGIC_LEN, is_torch_save};
pub use reader::{FileRecord, TorchSaveReader};
