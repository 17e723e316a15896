//! PyTorch's layout over a storage in memory: real checkpoints in, own checkpoints in and out,
//! and everything that can go wrong on the way.

mod byte_checkpoint;
#[cfg(feature = "zstd")]
mod compression;
mod crash;
mod damage;
mod fixtures;
mod hostile;
mod keys;
mod limits;
mod olmo;
mod ranges;
mod rank_local;
mod replaced;
mod roundtrip;
mod safetensors;
mod savers;
