//! The `.metadata` of PyTorch's distributed checkpoints: a pickle of `Metadata`, as written by
//! PyTorch 2.1 to 2.15, by OLMo-core, by Megatron-Core and by ByteCheckpoint.
//!
//! [`decode`] reads the pickle's nodes without creating Python objects. [`encode`] writes a pickle
//! for the PyTorch versions of a [`Profile`].

mod attributes;
mod class;
mod decode;
mod encode;
mod places;
mod profile;
mod profile_choice;
mod raw_storages;

pub use crate::chunk_geometry::check_chunks;
pub use decode::{Decoded, decode, decode_all, decode_parsed, decode_selected};
pub use encode::encode;
pub use profile::Profile;
pub use profile_choice::{IndexReader, ProfileChoice};
