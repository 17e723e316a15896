//! Reads the model configuration that Megatron-Bridge and NeMo write with a checkpoint, as
//! Megatron's arguments.

use serde_json::{Map, Value};

use crate::config::yaml;
use crate::error::MappingError;
use crate::facts::Facts;

/// Names that differ: the configuration's, and the argument's.
const RENAMED: &[(&str, &str)] = &[
    ("num_moe_experts", "num_experts"),
    ("rope_scaling", "use_rope_scaling"),
    ("seq_len_interpolation_factor", "rotary_seq_len_interpolation_factor"),
    ("yarn_rotary_scaling_factor", "rotary_scaling_factor"),
    ("yarn_mscale", "mscale"),
    ("yarn_mscale_all_dim", "mscale_all_dim"),
];

/// The rope settings that only a Llama 3.1 has in NeMo, with the arguments of Megatron.
const NEMO_ROPE: &[(&str, &str)] = &[
    ("scale_factor", "rope_scaling_factor"),
    ("low_freq_factor", "rope_low_freq_factor"),
    ("high_freq_factor", "rope_high_freq_factor"),
    ("old_context_len", "rope_original_max_position_embeddings"),
];

impl Facts {
    /// The model of a `run_config.yaml`, which Megatron-Bridge (and Megatron-LM 0.20 where it is
    /// configured so) writes beside a checkpoint, or of NeMo 2's `context/model.yaml`. Nothing in
    /// it is executed. `file` is what errors call it.
    ///
    /// # Errors
    ///
    /// [`MappingError::Yaml`] when it is no YAML, too large, or says nothing of a model.
    pub fn from_run_config(text: &str, file: &str) -> Result<Self, MappingError> {
        let root = yaml::parse(text, file)?;
        let section = ["model", "config"]
            .into_iter()
            .fold(&root, |at, name| at.get(name).filter(|below| below.is_object()).unwrap_or(at));
        let Some(model) = section.as_object() else { return Err(no_model(file)) };
        // Where the model is built from a configuration, that of its layers is a part of it.
        let layers = model.get("transformer").and_then(Value::as_object);
        let mut fields: Map<String, Value> = Map::new();
        for (name, value) in layers.into_iter().flatten().chain(model) {
            if let Some(value) = plain(value) {
                fields.insert(name.clone(), value);
            }
        }
        if !fields.contains_key("num_layers") {
            return Err(no_model(file));
        }
        Ok(Self::from_args(arguments(fields)))
    }
}

fn no_model(file: &str) -> MappingError {
    let problem = "it says nothing of a model: there is no num_layers".to_owned();
    MappingError::Yaml { file: file.to_owned(), line: 1, problem }
}

/// A value without what would be called to make it: a function or a dtype is its name, an
/// enumeration's member its value.
fn plain(value: &Value) -> Option<Value> {
    let Value::Object(fields) = value else {
        return Some(value.clone()).filter(|value| !value.is_null());
    };
    let target = fields.get("_target_")?;
    match fields.get("_args_").and_then(Value::as_array).map(Vec::as_slice) {
        Some([member]) if fields.contains_key("_name_") => Some(member.clone()),
        _ => Some(target.clone()),
    }
}

fn arguments(mut fields: Map<String, Value>) -> Map<String, Value> {
    for (name, argument) in RENAMED {
        if let Some(value) = fields.remove(*name) {
            fields.entry(*argument).or_insert(value);
        }
    }
    let is_on = |fields: &Map<_, _>, name: &str| fields.get(name) == Some(&Value::Bool(true));
    if let Some(Value::Bool(shared)) = fields.remove("share_embeddings_and_output_weights") {
        fields.insert("untie_embeddings_and_output_weights".to_owned(), (!shared).into());
    }
    if NEMO_ROPE.iter().all(|(name, _)| fields.get(*name).is_some_and(Value::is_number)) {
        for (name, argument) in NEMO_ROPE {
            if let Some(value) = fields.remove(*name) {
                fields.insert((*argument).to_owned(), value);
            }
        }
        fields.insert("use_rope_scaling".to_owned(), true.into());
    }
    // A function by its name, such as torch.nn.functional.silu; without one it is gelu.
    let function = fields.remove("activation_func");
    let function = function.as_ref().and_then(Value::as_str).unwrap_or("gelu");
    let function = function.rsplit('.').next().unwrap_or(function);
    let gated = is_on(&fields, "gated_linear_unit");
    let fused = is_on(&fields, "bias_activation_fusion");
    for (argument, on) in [
        ("swiglu", gated && function == "silu"),
        ("quick_geglu", gated && function == "quick_gelu"),
        ("squared_relu", !gated && function == "squared_relu"),
        ("openai_gelu", !gated && matches!(function, "openai_gelu" | "fast_gelu")),
        ("bias_gelu_fusion", !gated && function == "gelu" && fused),
    ] {
        fields.insert(argument.to_owned(), on.into());
    }
    if let Some(groups) = fields.get("num_query_groups") {
        let grouped = fields.get("num_attention_heads") != Some(groups);
        fields.insert("group_query_attention".to_owned(), grouped.into());
    }
    if is_on(&fields, "multi_latent_attention")
        && let Some(positions) = fields.remove("max_position_embeddings")
    {
        // Its name up to 0.12.
        fields.entry("original_max_position_embeddings").or_insert(positions);
    }
    // The model is built for sequences of this length.
    if let Some(length) = fields.get("seq_length").cloned() {
        fields.entry("max_position_embeddings").or_insert(length);
    }
    fields
}
