//! Reads a source: boxes of tensors, all elements in file order, objects.

pub(crate) mod chunk_index;
pub(crate) mod objects;
pub(crate) mod pieces;
pub(crate) mod runs;
pub(crate) mod segment_memory;
pub(crate) mod stored_items;
pub(crate) mod tensor_read;
pub(crate) mod ties;

pub use crate::error::ReadRefusal;
pub use objects::{ObjectResult, read_object, read_objects};
pub use runs::boxes;
pub use tensor_read::TensorReader;
