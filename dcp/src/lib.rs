//! Distributed model checkpoints: PyTorch DCP from Rust.
