//! On-disk formats: pickle, torch archives, PyTorch DCP metadata, safetensors.

pub mod dcp;
pub mod detect;
pub mod metadata;
pub mod pickle;
pub mod safetensors;
pub mod torch_object;
pub mod torch_tensor;
pub mod torch_zip;
mod upload;

pub use upload::Progress;
