//! A checkpoint format as a plug-in: the toy format, which shows what an author of a format writes.
//!
//! A checkpoint is a folder:
//!
//! | file | content |
//! |---|---|
//! | `index.toy` | CRC-32 of the rest (4 bytes, little-endian), then `CheckpointMetadata::to_wire` |
//! | `rank_{rank}.g{generation}.toy` | elements and objects, each followed by its CRC-32 |
//!
//! The index is written last and in one step, so it decides what the folder holds.

mod audit;
mod format;
mod names;
mod reader;
mod writer;

pub use format::ToyFormat;
pub use reader::ToyReader;
pub use writer::ToyWriter;
