//! The `config.json` that a model came with. It is kept among the arguments, for fields that
//! Megatron has no argument for.

use serde_json::{Map, Value};

use crate::config::incompatibilities::same;
use crate::facts::Facts;
use crate::mapping::Mapping;

/// The fact, and the argument, that holds it.
pub(crate) const OWN_CONFIG: &str = "hf_config";
/// Fields that describe the files, or the place of code that is not copied.
const NOT_CARRIED: &[&str] = &["auto_map", "quantization_config"];
/// Fields that a mapping speaks of by something else than its tables.
const SPOKEN: &[&str] = &[
    "decoder_sparse_step",
    "dtype",
    "first_k_dense_replace",
    "layer_types",
    "mlp_only_layers",
    "n_shared_experts",
    "q_lora_rank",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "topk_method",
    "torch_dtype",
];

/// Facts that a configuration may omit, or have under another name.
const TOLD_BY_TENSORS: &[&str] = &["ffn_hidden_size", "num_experts"];

impl Facts {
    /// The kind of model that it came as, by the `config.json` that came with it.
    pub(crate) fn own_model_type(&self) -> Option<&str> {
        self.get(OWN_CONFIG)?.get("model_type")?.as_str()
    }
}

impl Mapping {
    /// The configuration that a model of this family came with.
    pub(crate) fn own_config<'a>(&self, facts: &'a Facts) -> Option<&'a Map<String, Value>> {
        let kind = facts.own_model_type()?;
        let is_own = self.family.model_types.iter().any(|known| known == kind);
        facts.get(OWN_CONFIG).filter(|_| is_own)?.as_object()
    }

    /// Whether a configuration describes the same model as `made`, which is what would be
    /// written without it.
    pub(crate) fn still_tells(
        &self,
        own: &Map<String, Value>,
        facts: &Facts,
        made: &Map<String, Value>,
    ) -> bool {
        let stated = |config: &Map<String, Value>| {
            let (facts, _) = self.read_config(&Value::Object(config.clone()), true).ok()?;
            let mut facts = facts.values().clone();
            // Transformers saves no layers for multi-token prediction, and says that there are some.
            for name in [OWN_CONFIG, "mtp_num_layers"] {
                facts.shift_remove(name);
            }
            Some(facts)
        };
        let (Some(before), Some(now)) = (stated(own), stated(made)) else { return false };
        before.iter().all(|(name, value)| now.get(name).is_some_and(|now| same(now, value)))
            && now
                .keys()
                .all(|name| before.contains_key(name) || TOLD_BY_TENSORS.contains(&&**name))
            && self.dense_layers(own, facts) == self.dense_layers(made, facts)
    }

    /// The layers without experts, as a configuration says it.
    fn dense_layers(&self, config: &Map<String, Value>, facts: &Facts) -> Vec<u64> {
        let layers = facts.get("num_layers").and_then(Value::as_u64).unwrap_or(0);
        let number = |field: &str, usual: u64| {
            let absent = || self.config.absent.get(field).and_then(Value::as_u64);
            config.get(field).and_then(Value::as_u64).or_else(absent).unwrap_or(usual)
        };
        match self.config.moe_layers.as_deref() {
            Some("deepseek") => (0..layers.min(number("first_k_dense_replace", 0))).collect(),
            Some("qwen") => {
                let step = number("decoder_sparse_step", 1).max(1);
                let only = config.get("mlp_only_layers").and_then(Value::as_array);
                let is_only = |layer: u64| {
                    only.is_some_and(|only| only.iter().any(|at| at.as_u64() == Some(layer)))
                };
                (0..layers).filter(|at| is_only(*at) || (at + 1) % step != 0).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whether what is written says something of a field, be it that it is not there.
    pub(crate) fn speaks_of_field(&self, field: &str) -> bool {
        let config = &self.config;
        SPOKEN.contains(&field)
            || NOT_CARRIED.contains(&field)
            || config.fields.contains_key(field)
            || config.constants.contains_key(field)
            || config.defaults.contains_key(field)
            || config.absent.contains_key(field)
            || config.gelu.as_deref() == Some(field)
    }
}

/// A configuration that says which dtype the weights have, under the name that it uses.
pub(crate) fn with_dtype(
    mut config: Map<String, Value>,
    dtype: Option<&str>,
) -> Map<String, Value> {
    for field in NOT_CARRIED {
        config.shift_remove(*field);
    }
    let Some(dtype) = dtype else { return config };
    let name = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    for other in ["dtype", "torch_dtype"] {
        if other == name || config.contains_key(other) {
            config.insert(other.to_owned(), dtype.into());
        }
    }
    config
}
