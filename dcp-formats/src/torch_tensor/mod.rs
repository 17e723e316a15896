//! One tensor as `torch.save` stores it: an archive of a small pickle and a storage.
//!
//! [`TensorBlob`] finds out from a few bytes of such an archive what the tensor is and where its
//! bytes lie, [`TensorLayout`] is the tensor's description in the pickle, both ways, and brings
//! the elements of any layout into row-major order.

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
