//! On-disk formats: pickle, torch archives, PyTorch DCP metadata, safetensors, Hugging Face
//! folders.

pub mod dcp;
pub mod detect;
pub mod folder;
pub mod hf;
pub mod metadata;
pub mod pickle;
pub mod safetensors;
pub mod torch_object;
pub mod torch_save;
pub mod torch_tensor;
pub mod torch_zip;
mod unique;
mod upload;
pub mod zarr;

pub use upload::Progress;
