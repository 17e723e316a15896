//! On-disk formats: pickle, torch archives, PyTorch DCP metadata, safetensors, Hugging Face
//! folders.

pub mod dcp;
pub mod detect;
pub mod folder;
