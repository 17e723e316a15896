//! On-disk formats: pickle, torch archives, PyTorch DCP metadata, safetensors.
