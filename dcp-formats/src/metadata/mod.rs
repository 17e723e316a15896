//! The `.metadata` of PyTorch's distributed checkpoints: a pickle of `Metadata`, as written by
//! PyTorch 2.1 to 2.15, by OLMo-core and by Megatron-Core.
//!
//! [`decode`] walks the pickle's nodes and makes no Python object on the way; [`encode`] writes
//! one that PyTorch reads, for the versions that a [`Profile`] names.

mod attributes;
mod class;
mod decode;
mod encode;
mod geometry;
mod places;
mod profile;

pub use decode::{Decoded, decode, decode_all};
pub use encode::encode;
pub use geometry::check_chunks;
pub use profile::Profile;
