//! The plug-in formats of this crate.

use dcp_core::format::FormatRegistry;

/// The plug-in formats of this crate, of those that its features compile: `torch.save`, folders and files of
/// safetensors, PyTorch DCP.
#[must_use]
pub fn formats() -> FormatRegistry {
    let formats = FormatRegistry::empty();
    #[cfg(feature = "torch-save")]
    let formats = formats.with(std::sync::Arc::new(crate::torch_save::TorchSaveFormat));
    #[cfg(feature = "hf")]
    let formats = formats.with(std::sync::Arc::new(crate::hf::HuggingFaceFormat));
    #[cfg(feature = "torch-dcp")]
    let formats = formats.with(std::sync::Arc::new(crate::dcp::DcpFormat));
    formats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_of_the_build_are_listed_and_no_others() {
        let formats = formats();
        for (name, is_compiled) in [
            ("torch_save", cfg!(feature = "torch-save")),
            ("huggingface", cfg!(feature = "hf")),
            ("dcp", cfg!(feature = "torch-dcp")),
        ] {
            assert_eq!(formats.by_name(name).is_some(), is_compiled, "{name}");
        }
    }
}
