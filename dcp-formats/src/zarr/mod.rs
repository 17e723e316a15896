//! Uncompressed zarr arrays (version 2), as Megatron-Core up to 0.15 wrote them: read only.
//!
//! An array is a folder with a `.zarray`, which [`ArrayHeader`] parses, and a file for each cell of
//! a regular grid. [`ZarrReader`] reads a folder of arrays as a checkpoint.

mod arrays;
mod header;
mod reader;

pub use header::{ArrayHeader, HEADER_FILE};
pub use reader::ZarrReader;
