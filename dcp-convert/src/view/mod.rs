//! Checkpoints seen differently: readers over readers.

mod cast;
mod scratch;
mod selected;

pub use cast::Cast;
pub use selected::Selected;
