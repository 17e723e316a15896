//! Folders of safetensors files over a storage in memory: those of PyTorch's Hugging Face storage
//! in, own ones in and out, and everything that can be wrong with them.

mod damage;
mod folder;
mod read;
mod roundtrip;
mod write;
