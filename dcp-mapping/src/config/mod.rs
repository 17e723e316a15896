//! Translates transformers' `config.json` to Megatron's arguments and back.

pub(crate) mod incompatibilities;
pub(crate) mod original_config;
mod rope;
mod run_config;
mod yaml;

use dcp_core::Value as Py;
use dcp_core::value::Dict;
use serde_json::{Map, Value, json};

use crate::config::incompatibilities::{differs, settle};
use crate::config::original_config::{OWN_CONFIG, with_dtype};
use crate::error::MappingError;
use crate::facts::{Facts, bad};
use crate::mapping::{ConfigRules, Mapping};

/// The kinds of position scaling that a family can have.
const ROPES: &[&str] = &["plain", "llama3", "yarn", "unscaled"];
/// The ways in which a family states the layers with experts, and the size of shared experts.
const MOE_LAYERS: &[&str] = &["deepseek", "qwen"];

impl ConfigRules {
    /// Refuses names of rules that there are not.
    pub(crate) fn check(&self) -> Result<(), String> {
        let known = |what: &str, value: &Option<String>, names: &[&str]| match value {
            Some(value) if !names.contains(&value.as_str()) => {
                Err(format!("there is no {what} {value:?}; there are {}", names.join(", ")))
            }
            _ => Ok(()),
        };
        known("rope", &self.rope, ROPES)?;
        known("moe_layers", &self.moe_layers, MOE_LAYERS)
    }
}

impl Facts {
    /// The arguments of a Megatron run as its checkpoint holds them: the entries of `args`.
    /// Values that are no plain data are left out; dtypes are text such as `torch.bfloat16`.
    #[must_use]
    pub fn from_dict(args: &Dict) -> Self {
        let plain = |(key, value): (&Py, &Py)| Some((key.as_str()?.to_owned(), plain(value, 0)?));
        let mut facts = Self::from_args(args.iter().filter_map(plain).collect());
        // Its name in Megatron-Core up to 0.15.
        if let Some(epsilon) = facts.get("norm_epsilon").cloned() {
            facts.complete("layernorm_epsilon", epsilon);
        }
        facts
    }
}

fn plain(value: &Py, depth: usize) -> Option<Value> {
    const DEPTH_MAX: usize = 8;
    match value.view() {
        Py::Bool(b) => Some(Value::Bool(*b)),
        Py::Int(n) => Some(Value::from(*n)),
        Py::Float(x) => serde_json::Number::from_f64(*x).map(Value::Number),
        Py::Str(text) => Some(Value::from(&**text)),
        Py::Global(global) => Some(Value::String(global.to_string())),
        Py::None if depth > 0 => Some(Value::Null),
        Py::List(items) | Py::Tuple(items) if depth < DEPTH_MAX => {
            items.iter().map(|item| plain(item, depth + 1)).collect::<Option<_>>().map(Value::Array)
        }
        Py::Dict(fields) if depth < DEPTH_MAX => {
            let plain = |(key, value): (&Py, &Py)| {
                Some((key.as_str()?.to_owned(), plain(value, depth + 1)?))
            };
            fields.iter().map(plain).collect::<Option<_>>().map(Value::Object)
        }
        _ => None,
    }
}

impl Mapping {
    /// The facts in transformers' `config.json`, by the names that Megatron has for it.
    /// What it lacks is what transformers takes for it.
    ///
    /// # Errors
    ///
    /// [`MappingError::BadFact`] when it is no object, or a field of it is invalid,
    /// [`MappingError::Differs`] when Megatron does not do what a field says.
    pub fn facts_of_config(&self, config: &Value) -> Result<Facts, MappingError> {
        Ok(self.read_config(config, false)?.0)
    }

    /// Reads the facts as [`facts_of_config`](Self::facts_of_config) does, and with `ignore` turns
    /// what Megatron does not do into notes instead of errors.
    ///
    /// # Errors
    ///
    /// As [`facts_of_config`](Self::facts_of_config).
    pub fn read_config(
        &self,
        config: &Value,
        ignore: bool,
    ) -> Result<(Facts, Vec<String>), MappingError> {
        let Some(fields) = config.as_object() else {
            return Err(bad("config.json", &Value::Null, "it is not an object"));
        };
        let mut problems = self.beyond_megatron(fields);
        let fields = &self.with_absent(fields);
        self.refuse_no_heads(fields)?;
        let mut facts = Facts::new();
        for (field, arg) in &self.config.fields {
            let Some(value) = fields.get(field).filter(|value| !value.is_null()) else { continue };
            match (arg.strip_prefix('!'), value) {
                (None, value) => facts.complete(arg, value.clone()),
                (Some(arg), Value::Bool(on)) => facts.complete(arg, !on),
                (Some(_), value) => return Err(bad(field, value, "it must be true or false")),
            }
        }
        self.router_of_config(fields, &mut facts, &mut problems);
        for (arg, value) in self.config.args.iter().chain(&self.config.usual) {
            facts.complete(arg, value.clone());
        }
        self.gelu_of_config(fields, &mut facts, &mut problems);
        self.rope_of_config(fields, &mut facts, &mut problems);
        if let Some(window) = fields.get("sliding_window").filter(|_| self.config.window)
            && let Some(before) = window.as_u64().and_then(|window| window.checked_sub(1))
        {
            // Megatron counts the tokens before the one that looks, transformers that one too.
            facts.complete("window_size", json!([before, 0]));
        }
        if self.config.moe_layers.as_deref() == Some("deepseek")
            && let Some(shared) = fields.get("n_shared_experts").and_then(Value::as_u64)
            && let Some(size) = facts.get_u64("moe_ffn_hidden_size")?
        {
            let Some(size) = size.checked_mul(shared) else {
                return Err(bad("n_shared_experts", &shared.into(), "that is too large"));
            };
            facts.set("moe_shared_expert_intermediate_size", size);
        }
        if let Some(size) = facts.get("moe_ffn_hidden_size").cloned() {
            facts.complete("ffn_hidden_size", size);
        }
        let heads = facts.get_u64("num_attention_heads")?;
        if let (Some(heads), None) = (heads, facts.get_u64("kv_lora_rank")?) {
            facts.complete("num_query_groups", heads);
            let head = facts.get_u64("hidden_size")?.and_then(|size| size.checked_div(heads));
            if let Some(head) = head {
                facts.complete("kv_channels", head);
            }
            if facts.get_u64("kv_channels")? == Some(0) {
                let problem = "that is more heads than hidden_size has channels";
                return Err(bad(self.field_of("num_attention_heads"), &heads.into(), problem));
            }
            let grouped = facts.query_groups(heads)? != heads;
            facts.set("group_query_attention", grouped);
        }
        if let Some(length) = facts.get("max_position_embeddings").cloned() {
            facts.complete("seq_length", length);
        }
        problems.extend(self.groups_differ(&facts)?);
        problems.extend(self.biases_differ(&facts));
        facts.set(OWN_CONFIG, config.clone());
        let mut notes = Vec::new();
        settle(problems, ignore, &mut notes)?;
        Ok((facts, notes))
    }

    /// The field of `config.json` for an argument of Megatron's, which has the argument's name as a rule.
    fn field_of<'a>(&'a self, arg: &'a str) -> &'a str {
        let fields = &self.config.fields;
        fields.iter().find(|(_, known)| *known == arg).map_or(arg, |(field, _)| field)
    }

    /// Refuses heads that no model has. Every shape of attention is a product of these numbers, so an error
    /// about a shape would not name the setting.
    fn refuse_no_heads(&self, fields: &Map<String, Value>) -> Result<(), MappingError> {
        for arg in ["num_attention_heads", "num_query_groups", "kv_channels"] {
            let field = self.field_of(arg);
            let value = fields.get(field).filter(|value| !value.is_null());
            if let Some(value) = value.filter(|value| value.as_u64().is_none_or(|size| size == 0)) {
                return Err(bad(field, value, "it must be a whole number from 1"));
            }
        }
        Ok(())
    }

    /// The fields, and what transformers takes for those that are not there. Null is there.
    fn with_absent(&self, fields: &Map<String, Value>) -> Map<String, Value> {
        let mut fields = fields.clone();
        let parameters = fields.get("rope_parameters").and_then(Value::as_object);
        let theta = parameters.is_some_and(|parameters| parameters.contains_key("rope_theta"));
        for (field, value) in &self.config.absent {
            if !(fields.contains_key(field) || theta && field == "rope_theta") {
                fields.insert(field.clone(), value.clone());
            }
        }
        fields
    }

    fn router_of_config(
        &self,
        fields: &Map<String, Value>,
        facts: &mut Facts,
        problems: &mut Vec<MappingError>,
    ) {
        let config = &self.config;
        if config.moe_layers.as_deref() != Some("deepseek")
            || config.constants.contains_key("topk_method")
        {
            return;
        }
        match fields.get("topk_method") {
            Some(Value::String(method)) if method == "group_limited_greedy" => {}
            // The groups count for nothing.
            None | Some(Value::Null) => clear_groups(facts),
            Some(Value::String(method)) if method == "greedy" => clear_groups(facts),
            Some(method) => {
                let problem = "Megatron-Core has greedy and group_limited_greedy here";
                problems.push(differs("topk_method", method, problem));
            }
        }
    }

    fn gelu_of_config(
        &self,
        fields: &Map<String, Value>,
        facts: &mut Facts,
        problems: &mut Vec<MappingError>,
    ) {
        let Some((name, gelu)) = self.config.gelu.as_ref().and_then(|f| Some((f, fields.get(f)?)))
        else {
            return;
        };
        let tanh = match gelu.as_str() {
            Some("gelu_new" | "gelu_pytorch_tanh") => true,
            Some("gelu") => false,
            _ => {
                let problem = "Megatron-Core has gelu and gelu_new for this family";
                problems.push(differs(name, gelu, problem));
                return;
            }
        };
        // Megatron-Core computes it where it is fused, Megatron's older models by the other name.
        for arg in ["openai_gelu", "bias_gelu_fusion"] {
            facts.set(arg, tanh);
        }
    }

    /// A `config.json` for a model of this family, as far as `facts` has it: those of
    /// [`Mapped`](crate::Mapped), which have the facts from shapes.
    ///
    /// # Errors
    ///
    /// [`MappingError::BadFact`] when transformers has no way to say what the arguments do,
    /// [`MappingError::Unsaid`] when they lack a required field.
    pub fn config_json(&self, facts: &Facts) -> Result<Value, MappingError> {
        let mut config = self.config.constants.clone();
        for (field, arg) in &self.config.fields {
            let value = match arg.strip_prefix('!') {
                // Transformers checks types, and has no lists where Megatron may have one.
                None => facts.get(arg).filter(|v| !v.is_array() && !v.is_object()).cloned(),
                Some(arg) => facts.get_bool(arg).map(|on| Value::Bool(!on)),
            };
            if let Some(value) = value {
                config.insert(field.clone(), value);
            }
        }
        if config.contains_key("vocab_size") || facts.get("padded_vocab_size").is_some() {
            let rows = facts.get("vocab_size").or_else(|| facts.get("padded_vocab_size"));
            if let Some(rows) = rows {
                config.insert("vocab_size".to_owned(), rows.clone());
            }
        }
        for (field, value) in &self.config.defaults {
            if !config.contains_key(field) {
                config.insert(field.clone(), value.clone());
            }
        }
        self.rope_to_config(facts, &mut config);
        if self.config.window {
            let before = facts.get("window_size").and_then(|window| window.get(0)?.as_u64());
            let window = before.and_then(|before| before.checked_add(1));
            config.insert("sliding_window".to_owned(), window.into());
        }
        self.moe_to_config(facts, &mut config)?;
        if let Some(field) = &self.config.gelu {
            let on = |arg| facts.get_bool(arg);
            let gelu = match (on("openai_gelu"), on("bias_gelu_fusion")) {
                (Some(true), _) | (_, Some(true)) => Some("gelu_new"),
                (_, Some(false)) => Some("gelu"),
                _ => None,
            };
            config.extend(gelu.map(|gelu| (field.clone(), gelu.into())));
        }
        let unsaid = self.config.required.iter().filter(|field| !config.contains_key(*field));
        let fields: Vec<_> = unsaid.cloned().collect();
        if !fields.is_empty() {
            return Err(MappingError::Unsaid { fields });
        }
        let dtype = facts.get("params_dtype").and_then(Value::as_str);
        let dtype = dtype.map(|dtype| dtype.strip_prefix("torch.").unwrap_or(dtype));
        if let Some(own) = self.own_config(facts) {
            if self.still_tells(own, facts, &config) {
                let mut own = with_dtype(own.clone(), dtype);
                own.extend(
                    config
                        .remove_entry("architectures")
                        .filter(|(field, _)| !own.contains_key(field)),
                );
                return Ok(Value::Object(own));
            }
            for (field, value) in own.iter().filter(|(field, _)| !self.speaks_of_field(field)) {
                config.entry(field).or_insert_with(|| value.clone());
            }
        }
        // Transformers would take those of another tokenizer.
        for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            config.entry(token).or_insert(Value::Null);
        }
        Ok(Value::Object(with_dtype(config, dtype)))
    }

    fn moe_to_config(
        &self,
        facts: &Facts,
        config: &mut Map<String, Value>,
    ) -> Result<(), MappingError> {
        let Some(kind) = self.config.moe_layers.as_deref() else { return Ok(()) };
        let which = facts.get("moe_layer_freq").and_then(Value::as_array);
        let dense = which.map(|which| {
            let is_dense = |(at, moe): (usize, &Value)| (moe.as_u64() == Some(0)).then_some(at);
            which.iter().enumerate().filter_map(is_dense).collect::<Vec<_>>()
        });
        let dense = dense.unwrap_or_default();
        if kind == "qwen" {
            config.insert("decoder_sparse_step".to_owned(), 1.into());
            config.insert("mlp_only_layers".to_owned(), dense.into());
            return Ok(());
        }
        if dense.iter().enumerate().any(|(at, layer)| at != *layer) {
            let which = which.cloned().map_or(Value::Null, Value::Array);
            let problem = "transformers has only the first layers of this family without experts";
            return Err(bad("moe_layer_freq", &which, problem));
        }
        config.insert("first_k_dense_replace".to_owned(), dense.len().into());
        if !config.contains_key("topk_method") {
            let groups = config.get("n_group").and_then(Value::as_u64).unwrap_or(1);
            let method = if groups > 1 { "group_limited_greedy" } else { "greedy" };
            config.insert("topk_method".to_owned(), method.into());
        }
        let size = facts.get_u64("moe_ffn_hidden_size")?;
        let shared = facts.get_u64("moe_shared_expert_intermediate_size")?;
        if let (Some(size), Some(shared)) = (size, shared) {
            if shared.checked_rem(size) != Some(0) {
                let problem = format!("it is not a multiple of the experts' size, {size}");
                return Err(bad("moe_shared_expert_intermediate_size", &shared.into(), &problem));
            }
            config.insert("n_shared_experts".to_owned(), (shared / size).into());
        }
        // What is not said, transformers takes from the largest model.
        for field in ["q_lora_rank", "n_shared_experts"] {
            config.entry(field).or_insert(Value::Null);
        }
        Ok(())
    }
}

fn clear_groups(facts: &mut Facts) {
    for arg in ["moe_router_num_groups", "moe_router_group_topk"] {
        facts.set(arg, Value::Null);
    }
}
