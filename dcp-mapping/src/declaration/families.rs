//! The families that come with this crate.

macro_rules! families {
    ($($name:literal),* $(,)?) => {
        pub(crate) const NAMES: &[&str] = &[$($name),*];
        pub(crate) const FILES: &[(&str, &str)] = &[$((
            concat!("families/", $name, ".toml"),
            include_str!(concat!("../../families/", $name, ".toml")),
        )),*];
    };
}

/// The mappings of other programs than Megatron-Core, by name. They are never recognized: other families
/// have the same `config.json`.
pub(crate) const PROGRAMS: &[(&str, &str, &str)] = &[(
    "torchtitan_llama",
    "families/torchtitan_llama.toml",
    include_str!("../../families/torchtitan_llama.toml"),
)];

families! {
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt2",
    "phi3",
}
