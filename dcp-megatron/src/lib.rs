//! Checkpoints of [Megatron-Core](https://github.com/NVIDIA/Megatron-LM): its sharded state
//! dicts, its save and load, and every age of its on-disk formats, without Megatron.

mod error;
pub mod optimizer;
pub mod sharded;
mod tracker;
mod writer;

pub use error::MegatronError;
pub use tracker::{TRACKER, Tracked, write_tracker};
pub use writer::{MegatronForm, MegatronWriter, MegatronWriterBuilder};
