//! Compares the settings of a `config.json` with tensors that have transformers' names already.

use dcp_core::{CheckpointMetadata, Dims};
use dcp_jobs::Error;
use dcp_jobs::cast::is_float;
use serde_json::Value;

use super::family_tensors::{refuse_homeless, refuse_missing};
use super::job_error::{contradiction, missing};
use crate::mapping::Mapping;

/// For each axis of a tensor, the settings and numbers whose product it is.
type Axes = &'static [&'static [&'static str]];

const HIDDEN: &[&str] = &["hidden_size"];
const VOCABULARY: &[&str] = &["vocab_size"];
const QUERY: &[&str] = &["num_attention_heads", "head_dim"];
const KEY: &[&str] = &["num_key_value_heads", "head_dim"];
const MLP: &[&str] = &["intermediate_size"];
const EXPERT: &[&str] = &["moe_intermediate_size"];
const EMBEDDING: &[&str] = &["n_embd"];

/// Tensors of all decoders with RMS norms.
const DECODER: &[(&str, Axes)] = &[
    ("model.embed_tokens.weight", &[VOCABULARY, HIDDEN]),
    ("model.norm.weight", &[HIDDEN]),
    ("lm_head.weight", &[VOCABULARY, HIDDEN]),
    ("layer.input_layernorm.weight", &[HIDDEN]),
    ("layer.post_attention_layernorm.weight", &[HIDDEN]),
    ("layer.mlp.gate_proj.weight", &[MLP, HIDDEN]),
    ("layer.mlp.up_proj.weight", &[MLP, HIDDEN]),
    ("layer.mlp.down_proj.weight", &[HIDDEN, MLP]),
    ("layer.mlp.gate_up_proj.weight", &[&["2", "intermediate_size"], HIDDEN]),
    ("layer.block_sparse_moe.gate.weight", &[&["num_local_experts"], HIDDEN]),
    ("layer.block_sparse_moe.experts.expert.w1.weight", &[MLP, HIDDEN]),
    ("layer.block_sparse_moe.experts.expert.w2.weight", &[HIDDEN, MLP]),
    ("layer.block_sparse_moe.experts.expert.w3.weight", &[MLP, HIDDEN]),
    ("layer.mlp.experts.expert.gate_proj.weight", &[EXPERT, HIDDEN]),
    ("layer.mlp.experts.expert.up_proj.weight", &[EXPERT, HIDDEN]),
    ("layer.mlp.experts.expert.down_proj.weight", &[HIDDEN, EXPERT]),
];
/// Tensors of attention without compressed keys.
const ATTENTION: &[(&str, Axes)] = &[
    ("layer.self_attn.q_proj.weight", &[QUERY, HIDDEN]),
    ("layer.self_attn.k_proj.weight", &[KEY, HIDDEN]),
    ("layer.self_attn.v_proj.weight", &[KEY, HIDDEN]),
    ("layer.self_attn.o_proj.weight", &[HIDDEN, QUERY]),
    ("layer.self_attn.q_proj.bias", &[QUERY]),
    ("layer.self_attn.k_proj.bias", &[KEY]),
    ("layer.self_attn.v_proj.bias", &[KEY]),
];
const GPT2: &[(&str, Axes)] = &[
    ("wte.weight", &[VOCABULARY, EMBEDDING]),
    ("wpe.weight", &[&["n_positions"], EMBEDDING]),
    ("ln_f.weight", &[EMBEDDING]),
    ("layer.ln_1.weight", &[EMBEDDING]),
    ("layer.attn.c_attn.weight", &[EMBEDDING, &["3", "n_embd"]]),
    ("layer.attn.c_proj.weight", &[EMBEDDING, EMBEDDING]),
    ("layer.mlp.c_fc.weight", &[EMBEDDING, &["n_inner"]]),
    ("layer.mlp.c_proj.weight", &[&["n_inner"], EMBEDDING]),
];

/// Settings of a model that are whole numbers, besides those in the tables of axes.
const NUMBERS: &[&str] = &[
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "num_nextn_predict_layers",
];
/// Numbers that transformers works out from others where a configuration has none, or null.
const DERIVED: &[&str] =
    &["num_key_value_heads", "head_dim", "n_inner", "num_nextn_predict_layers"];
/// Settings of a model that are true or false.
const FLAGS: &[&str] = &["attention_bias", "mlp_bias", "tie_word_embeddings"];

/// Settings of GPT-2, and the names that transformers reads as the same.
const GPT2_NAMES: &[(&str, &str)] = &[
    ("n_embd", "hidden_size"),
    ("n_positions", "max_position_embeddings"),
    ("n_layer", "num_hidden_layers"),
];

/// Biases that a setting or the family decides: the setting, and the part of the names of tensors.
const BIASES: &[(&str, &str, &str)] = &[
    ("attention_bias", ".self_attn.q_proj.weight", ".self_attn.q_proj.bias"),
    ("mlp_bias", ".mlp.down_proj.weight", ".mlp.down_proj.bias"),
];

/// The settings of a model of a family.
struct Settings<'a> {
    family: &'a Mapping,
    config: &'a Value,
    /// Whether the tensors are a whole model, and not some chosen ones, or one shard.
    is_whole: bool,
}

impl Settings<'_> {
    /// The value of a setting in `config.json`.
    fn stated(&self, setting: &str) -> Option<&Value> {
        let other = GPT2_NAMES.iter().find(|(name, _)| *name == setting);
        let other = other.and_then(|(_, other)| self.config.get(*other));
        self.config.get(setting).or(other)
    }

    /// Refuses values of another type than the setting has.
    fn refuse_types(&self, tables: &[&[(&str, Axes)]]) -> Result<(), Error> {
        let of_tables = tables.iter().copied().flatten().flat_map(|(_, axes)| axes.iter());
        let of_tables = of_tables.copied().flatten().copied();
        let is_literal = |setting: &str| setting.parse::<u64>().is_ok();
        for setting in of_tables.chain(NUMBERS.iter().copied()).filter(|one| !is_literal(one)) {
            let Some(stated) = self.stated(setting) else { continue };
            let is_derived = stated.is_null() && DERIVED.contains(&setting);
            if !is_derived && stated.as_u64().is_none() {
                let problem = format!("a whole number is needed, not {}", kind(stated));
                return Err(contradiction(setting, stated, &problem));
            }
        }
        for setting in FLAGS {
            let Some(stated) = self.stated(setting) else { continue };
            if !stated.is_boolean() && !stated.is_null() {
                let problem = format!("true or false is needed, not {}", kind(stated));
                return Err(contradiction(setting, stated, &problem));
            }
        }
        Ok(())
    }

    /// Refuses that a size is missing, for which transformers then takes that of a usual model.
    fn refuse_missing(&self, setting: &str, problem: &str) -> Result<(), Error> {
        let is_missing = self.number(setting).is_none() && !DERIVED.contains(&setting);
        if self.is_whole && is_missing { Err(missing(setting, problem)) } else { Ok(()) }
    }

    /// The value of a setting, or the one that transformers uses where `config.json` has none.
    fn value(&self, setting: &str) -> Option<&Value> {
        let stated = self.stated(setting);
        stated.or_else(|| self.family.config.absent.get(setting)).filter(|value| !value.is_null())
    }

    fn number(&self, setting: &str) -> Option<u64> {
        if let Ok(literal) = setting.parse() {
            return Some(literal);
        }
        if let Some(value) = self.value(setting) {
            return value.as_u64();
        }
        match setting {
            "num_key_value_heads" => self.number("num_attention_heads"),
            // The other families have a number of their own.
            "head_dim"
                if matches!(self.family.name(), "llama" | "mistral" | "mixtral" | "qwen2") =>
            {
                self.number("hidden_size")?.checked_div(self.number("num_attention_heads")?)
            }
            "n_inner" => self.number("n_embd")?.checked_mul(4),
            _ => None,
        }
    }

    fn is_set(&self, setting: &str) -> bool {
        self.value(setting).and_then(Value::as_bool) == Some(true)
    }

    fn product(&self, settings: &[&str]) -> Option<u64> {
        settings.iter().try_fold(1_u64, |all, one| all.checked_mul(self.number(one)?))
    }

    /// Compares the shape of a tensor.
    fn refuse_shape(&self, fqn: &str, shape: &Dims, axes: Axes) -> Result<(), Error> {
        if shape.ndim() != axes.len() {
            return Ok(());
        }
        for (axis, (found, settings)) in shape.iter().zip(axes).enumerate() {
            let found_here = format!("{fqn:?} has {found} on its axis {axis}");
            for setting in *settings {
                self.refuse_missing(setting, &found_here)?;
            }
            let Some(stated) = self.product(settings).filter(|stated| stated != found) else {
                continue;
            };
            let setting = settings.join(" * ");
            return Err(contradiction(&setting, &stated.into(), &found_here));
        }
        Ok(())
    }
}

/// Refuses settings that contradict the tensors: transformers cannot load tensors of other shapes, and
/// initializes layers and biases that are missing with random numbers.
pub(super) fn refuse_contradictions(
    family: &Mapping,
    config: &Value,
    metadata: &CheckpointMetadata,
) -> Result<(), Error> {
    refuse_no_heads(config)?;
    let is_gpt2 = family.name() == "gpt2";
    let is_whole = has_both_ends(metadata, is_gpt2);
    let settings = Settings { family, config, is_whole };
    let has_plain_keys = !family.name().starts_with("deepseek");
    let tables: &[_] = match (is_gpt2, has_plain_keys) {
        (true, _) => &[GPT2],
        (_, true) => &[DECODER, ATTENTION],
        (_, false) => &[DECODER],
    };
    settings.refuse_types(tables)?;
    // Packed weights have other shapes.
    if config.get("quantization_config").is_some_and(|value| !value.is_null()) {
        return Ok(());
    }
    let tensors = metadata.iter().filter_map(|(fqn, entry)| Some((fqn, entry.as_tensor()?)));
    let mut layers = Layers::default();
    for (fqn, tensor) in tensors.filter(|(_, tensor)| is_float(tensor.dtype)) {
        let Some((general, layer)) = general_name(fqn, is_gpt2) else { continue };
        layers.add(layer);
        let known = tables.iter().copied().flatten().find(|(name, _)| *name == general);
        if let Some((_, axes)) = known {
            settings.refuse_shape(fqn, &tensor.shape, axes)?;
        }
    }
    if !is_gpt2 {
        refuse_biases(&settings, metadata)?;
    }
    // Of others, nothing is missing.
    if !is_whole {
        return refuse_homeless(family, metadata);
    }
    let setting = if is_gpt2 { "n_layer" } else { "num_hidden_layers" };
    settings.refuse_missing(setting, &format!("the tensors have {} layers", layers.found.len()))?;
    let stated = settings.number(setting);
    if let Some(stated) = stated {
        // The number that transformers takes for DeepSeek-V3 without the setting.
        let usual = u64::from(family.name() == "deepseek_v3");
        let further = settings.number("num_nextn_predict_layers").unwrap_or(usual);
        layers.refuse_number(setting, stated, further)?;
    }
    if !is_gpt2 {
        refuse_head(&settings, metadata)?;
    }
    refuse_missing(family, config, metadata, stated.unwrap_or(u64::MAX))?;
    refuse_homeless(family, metadata)
}

/// The kind of a JSON value, as the object of a sentence.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number with a sign or a fraction",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Refuses attention without heads, by which no shape can be divided.
fn refuse_no_heads(config: &Value) -> Result<(), Error> {
    let is_zero = |setting: &&&str| config.get(**setting).and_then(Value::as_u64) == Some(0);
    match ["num_attention_heads", "num_key_value_heads", "n_head"].iter().find(is_zero) {
        Some(setting) => Err(contradiction(setting, &0.into(), "a model has at least one head")),
        None => Ok(()),
    }
}

/// Whether there are the first and the last tensor of a model, so that what is between them should be there.
fn has_both_ends(metadata: &CheckpointMetadata, is_gpt2: bool) -> bool {
    let has = |fqn: &str| metadata.get(fqn).is_some();
    match is_gpt2 {
        true => ["", "transformer."].iter().any(|prefix| {
            has(&format!("{prefix}wte.weight")) && has(&format!("{prefix}ln_f.weight"))
        }),
        false => has("model.embed_tokens.weight") && has("model.norm.weight"),
    }
}

/// Refuses a setting of biases that tensors contradict.
fn refuse_biases(settings: &Settings<'_>, metadata: &CheckpointMetadata) -> Result<(), Error> {
    let first = |part: &str| metadata.iter().map(|(fqn, _)| fqn).find(|fqn| fqn.ends_with(part));
    for (setting, weight, bias) in BIASES {
        let Some(weight) = first(weight) else { continue };
        let of_family = settings.family.name() == "qwen2" && *setting == "attention_bias";
        let is_setting = settings.family.config.fields.contains_key(*setting);
        let is_stated = of_family || is_setting && settings.is_set(setting);
        let (name, value) = match of_family {
            true => ("model_type", settings.family.name().into()),
            false => (*setting, is_stated.into()),
        };
        match first(bias) {
            None if is_stated => {
                let problem = format!("there is no bias beside {weight:?}");
                return Err(contradiction(name, &value, &problem));
            }
            Some(bias) if is_setting && !is_stated => {
                return Err(contradiction(name, &value, &format!("there is {bias:?}")));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Refuses a model whose output weights are neither there nor tied, and experts that are not there.
fn refuse_head(settings: &Settings<'_>, metadata: &CheckpointMetadata) -> Result<(), Error> {
    let has = |fqn: &str| metadata.get(fqn).is_some();
    let architectures = settings.config.get("architectures").and_then(Value::as_array);
    let generates = architectures.is_some_and(|all| {
        all.iter().filter_map(Value::as_str).all(|name| name.ends_with("ForCausalLM"))
    });
    let setting = "tie_word_embeddings";
    if generates && !settings.is_set(setting) && !has("lm_head.weight") {
        let problem = "there is no \"lm_head.weight\"";
        return Err(contradiction(setting, &false.into(), problem));
    }
    let mut names = metadata.iter().map(|(fqn, _)| fqn);
    if settings.family.name() == "mixtral" && !names.any(|fqn| fqn.contains(".experts.")) {
        let problem = "there are no experts";
        return Err(contradiction("model_type", &"mixtral".into(), problem));
    }
    Ok(())
}

/// The name of a tensor with `layer` for the path of its layer and `expert` for the number of its expert,
/// and the layer.
fn general_name(fqn: &str, is_gpt2: bool) -> Option<(String, Option<u64>)> {
    let (name, path) = match is_gpt2 {
        true => (fqn.strip_prefix("transformer.").unwrap_or(fqn), "h."),
        false => (fqn, "model.layers."),
    };
    let Some(rest) = name.strip_prefix(path) else { return Some((name.to_owned(), None)) };
    let (layer, rest) = rest.split_once('.')?;
    let layer = layer.parse().ok()?;
    let rest = match rest.split_once(".experts.") {
        Some((block, expert)) => {
            let (number, weight) = expert.split_once('.')?;
            number.parse::<u64>().ok()?;
            format!("{block}.experts.expert.{weight}")
        }
        None => rest.to_owned(),
    };
    Some((format!("layer.{rest}"), Some(layer)))
}

/// The layers of a model.
#[derive(Default)]
struct Layers {
    found: std::collections::BTreeSet<u64>,
}

impl Layers {
    fn add(&mut self, layer: Option<u64>) {
        self.found.extend(layer);
    }

    /// Refuses another number of layers, and `further` ones for multi-token prediction.
    fn refuse_number(&self, setting: &str, stated: u64, further: u64) -> Result<(), Error> {
        let (Some(last), found) = (self.found.last(), self.found.len() as u64) else {
            return Ok(());
        };
        let end = last.saturating_add(1);
        if stated <= end && end <= stated.saturating_add(further) && found == end {
            return Ok(());
        }
        let problem = match found == end {
            true => format!("the tensors have {found} layers"),
            false => {
                format!("the tensors have {found} layers, the last of them with the number {last}")
            }
        };
        Err(contradiction(setting, &stated.into(), &problem))
    }
}
