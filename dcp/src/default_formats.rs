//! The formats of this build's features.

use dcp_core::format::FormatRegistry;

/// The formats that this build opens: PyTorch DCP, safetensors and `torch.save`; with their
/// features, those of OLMo-core and Megatron-Core. A plug-in registers its own in addition.
#[must_use]
pub fn default_formats() -> FormatRegistry {
    #[cfg(feature = "convert")]
    let formats = dcp_convert::formats();
    #[cfg(not(feature = "convert"))]
    let formats = dcp_formats::formats();
    #[cfg(feature = "olmo")]
    let formats = formats.with(std::sync::Arc::new(dcp_olmo::OlmoFormat));
    #[cfg(feature = "megatron")]
    let formats = formats.with(std::sync::Arc::new(dcp_megatron::MegatronCoreFormat));
    formats
}
