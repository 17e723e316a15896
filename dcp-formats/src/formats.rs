//! The plug-in formats of this crate.

use std::sync::Arc;

use dcp_core::format::FormatRegistry;

use crate::dcp::DcpFormat;
use crate::hf::HuggingFaceFormat;
use crate::torch_save::TorchSaveFormat;

/// The plug-in formats of this crate: `torch.save`, folders and files of safetensors, PyTorch DCP.
#[must_use]
pub fn formats() -> FormatRegistry {
    FormatRegistry::empty()
        .with(Arc::new(TorchSaveFormat))
        .with(Arc::new(HuggingFaceFormat))
        .with(Arc::new(DcpFormat))
}
