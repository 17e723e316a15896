//! Checkpoints seen differently: readers over readers.

mod selected;

pub use selected::Selected;
