//! What is fuzzed: a file that claims to be a mapping, put to use, or a model's configuration.

use dcp_mapping::{Facts, Mapping};
use serde_json::json;

/// Reads a mapping and turns arguments into a configuration and back.
pub(crate) fn mapping(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    drop(Facts::from_run_config(text, "fuzz.yaml"));
    let Ok(mapping) = Mapping::parse(text, "fuzz.toml") else { return };
    let config = json!({
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 11,
        "tie_word_embeddings": true, "rope_scaling": { "rope_type": "yarn", "factor": 2.0 },
        "n_shared_experts": 2, "moe_intermediate_size": 3, "sliding_window": 5,
    });
    let facts = mapping.facts_of_config(&config).unwrap_or_else(|_| Facts::new());
    drop(mapping.config_json(&facts));
}
