//! The formats and frameworks of this build's features, to which plug-ins add theirs.

use dcp_core::format::FormatRegistry;
#[cfg(feature = "jobs")]
use dcp_jobs::framework::Frameworks;

/// The formats that this build opens: PyTorch DCP, safetensors and `torch.save`; with their
/// features, those of OLMo-core, Megatron-Core, PEFT and DeepSpeed. A plug-in registers its own in addition.
#[must_use]
pub fn default_formats() -> FormatRegistry {
    #[cfg(feature = "jobs")]
    let formats = dcp_jobs::listing::formats();
    #[cfg(not(feature = "jobs"))]
    let formats = dcp_formats::formats();
    #[cfg(feature = "olmo")]
    let formats = formats.with(std::sync::Arc::new(dcp_olmo::OlmoFormat));
    #[cfg(feature = "megatron")]
    let formats = formats.with(std::sync::Arc::new(dcp_megatron::MegatronCoreFormat));
    #[cfg(feature = "peft")]
    let formats = formats.with(std::sync::Arc::new(dcp_peft::PeftFormat));
    #[cfg(feature = "deepspeed")]
    let formats = formats.with(std::sync::Arc::new(dcp_deepspeed::DeepSpeedFormat));
    #[cfg(feature = "trainers")]
    let formats = formats.with(std::sync::Arc::new(dcp_trainers::RankFilesFormat));
    formats
}

/// The frameworks and the mapping that add to jobs in this build: with their features, Megatron-Core, OLMo-core,
/// PEFT, DeepSpeed and the mapping of names. A plug-in adds its own.
#[cfg(feature = "jobs")]
#[must_use]
pub fn default_frameworks() -> Frameworks {
    let frameworks = Frameworks::none();
    // OLMo-core's layout is applied to what Megatron-Core's options made of the optimizer.
    #[cfg(feature = "megatron")]
    let frameworks = frameworks.with(std::sync::Arc::new(dcp_megatron::framework::Megatron));
    #[cfg(feature = "olmo")]
    let frameworks = frameworks.with(std::sync::Arc::new(dcp_olmo::Olmo));
    #[cfg(feature = "peft")]
    let frameworks = frameworks.with(std::sync::Arc::new(dcp_peft::Peft));
    #[cfg(feature = "deepspeed")]
    let frameworks = frameworks.with(std::sync::Arc::new(dcp_deepspeed::DeepSpeed));
    #[cfg(feature = "trainers")]
    let frameworks = frameworks.with(std::sync::Arc::new(dcp_trainers::RankFiles));
    #[cfg(feature = "mapping")]
    let frameworks = frameworks.with_mapping(std::sync::Arc::new(dcp_mapping::FamilyMapping));
    frameworks
}
