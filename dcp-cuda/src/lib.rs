#![doc = include_str!("../README.md")]

mod completion;
mod device;
#[cfg(feature = "cuda")]
mod driver;
mod error;
mod pinned;
mod ranges;
mod staging;

pub use crate::device::Device;
#[cfg(feature = "cuda")]
pub use crate::driver::{CudaCopy, CudaDevice, CudaError, CudaMemory};
pub use crate::error::StagingError;
pub use crate::staging::{
    DEFAULT_CHUNK_BYTES, DEFAULT_CHUNKS, DEFAULT_LENT_BYTES, PinnedStaging, PinnedStagingBuilder,
};
#[cfg(feature = "cuda")]
pub use cudarc;
