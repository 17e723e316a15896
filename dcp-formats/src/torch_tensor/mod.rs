//! A tensor as `torch.save` stores it: an archive of a small pickle and a storage.
//!
//! [`TensorBlob`] locates the tensor and its bytes from a few bytes of the archive.
//! [`TensorLayout`] is the tensor's description in the pickle, for reading and writing, and gathers
//! elements of any layout into row-major order.

mod blob;
mod gather;
mod layout;
mod read;
mod storage_class;
mod wrapped;
mod write;

pub use blob::{ByteOrder, TensorBlob};
pub(crate) use blob::{byte_order, small_record, storage_record};
pub(crate) use read::{makes_tensor, stored};
pub(crate) use wrapped::{is_too_short, wrapped, wrapped_in};

pub use layout::{Quantizer, StorageRef, TensorLayout};
