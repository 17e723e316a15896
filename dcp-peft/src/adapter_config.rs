//! `adapter_config.json`: how the tensors of an adapter change a model.

use std::collections::BTreeMap;

use dcp_core::FormatError;
use dcp_core::text::Quoted;
use indexmap::IndexMap;
use regex::Regex;
use serde::Deserialize;
use serde_json::Value;

/// The name of the file.
pub const CONFIG_NAME: &str = "adapter_config.json";

/// Settings that decide about training, or name what the tensors say by themselves. The merged weights do
/// not depend on them.
const WITHOUT_EFFECT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "target_modules",
    "task_type",
];

/// The values of `init_lora_weights` that leave the base model as it is. PiSSA, OLoRA, CorDA and LoftQ
/// subtract the first adapter from it.
const PLAIN_INITIALIZATIONS: &[&str] = &["gaussian", "eva", "orthogonal"];

/// The settings of a LoRA adapter that decide about the merged weights, as PEFT 0.21 writes them.
#[derive(Clone, Debug)]
pub struct AdapterConfig {
    rank: u64,
    alpha: f64,
    ranks: Vec<(Regex, u64)>,
    alphas: Vec<(Regex, f64)>,
    is_rank_stabilized: bool,
    has_magnitudes: bool,
    is_input_first: bool,
}

/// The file, with the settings that have no field of their own in `rest`.
#[derive(Deserialize)]
struct File {
    peft_type: Option<String>,
    r: Option<u64>,
    lora_alpha: Option<f64>,
    #[serde(default)]
    rank_pattern: Option<IndexMap<String, u64>>,
    #[serde(default)]
    alpha_pattern: Option<IndexMap<String, f64>>,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    init_lora_weights: Value,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

impl AdapterConfig {
    /// The maximum size of the file in bytes; longer ones are not read.
    pub const BYTES_MAX: u64 = 4 << 20;

    /// Parses an `adapter_config.json`.
    ///
    /// # Errors
    ///
    /// When it is not the configuration of a LoRA adapter, or has a setting that changes the merged weights in
    /// a way that is not known. Settings of later versions of PEFT are accepted where they are off.
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        let bad = |problem: String| FormatError::new(CONFIG_NAME, problem);
        let start = json.iter().find(|byte| !byte.is_ascii_whitespace());
        if start.is_some_and(|byte| *byte != b'{') {
            return Err(bad("it is no JSON object".to_owned()));
        }
        let file: File = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        match file.peft_type.as_deref() {
            Some("LORA") => {}
            Some(other) => {
                return Err(bad(format!(
                    "it is of an adapter of type {}, not LORA",
                    Quoted(other)
                )));
            }
            None => return Err(bad("it has no peft_type".to_owned())),
        }
        let unknown = |(name, value): (&String, &Value)| {
            (!WITHOUT_EFFECT.contains(&&**name) && !is_off(value)).then(|| name.clone())
        };
        if let Some(name) = file.rest.iter().find_map(unknown) {
            let name = Quoted(&name);
            return Err(bad(format!(
                "the setting {name} changes the merged weights; merge the adapter with PEFT's merge_and_unload"
            )));
        }
        let is_plain = match &file.init_lora_weights {
            Value::String(how) => PLAIN_INITIALIZATIONS.contains(&&**how),
            _ => true,
        };
        if !is_plain {
            let how = file.init_lora_weights.to_string();
            return Err(bad(format!(
                "init_lora_weights is {how}, which changes the base model; convert the adapter with \
                 path_initial_model_for_weight_conversion of PEFT's save_pretrained"
            )));
        }
        let (Some(rank), Some(alpha)) = (file.r, file.lora_alpha) else {
            return Err(bad("it has no r or no lora_alpha".to_owned()));
        };
        let ranks = patterns(file.rank_pattern.unwrap_or_default())?;
        if rank == 0 || ranks.iter().any(|(_, rank)| *rank == 0) {
            return Err(bad("it has a rank of 0".to_owned()));
        }
        Ok(Self {
            rank,
            alpha,
            ranks,
            alphas: patterns(file.alpha_pattern.unwrap_or_default())?,
            is_rank_stabilized: file.use_rslora,
            has_magnitudes: file.use_dora,
            is_input_first: file.fan_in_fan_out,
        })
    }

    /// The rank of the matrices of `module`.
    #[must_use]
    pub fn rank(&self, module: &str) -> u64 {
        first_match(&self.ranks, module).unwrap_or(self.rank)
    }

    /// The factor of the product of the matrices of `module`: `alpha / r`, or `alpha / sqrt(r)` of a
    /// rank-stabilized adapter; as PyTorch multiplies a `float32` tensor by it.
    #[must_use]
    pub fn scaling(&self, module: &str) -> f32 {
        let alpha = first_match(&self.alphas, module).unwrap_or(self.alpha);
        // Ranks are far below 2^53.
        let rank = self.rank(module) as f64;
        let scaling = if self.is_rank_stabilized { alpha / rank.sqrt() } else { alpha / rank };
        scaling as f32
    }

    /// Whether the adapter is a DoRA: rows of merged weights are scaled to magnitudes that it has.
    #[must_use]
    pub fn has_magnitudes(&self) -> bool {
        self.has_magnitudes
    }

    /// Whether the model stores matrices as inputs × outputs (`fan_in_fan_out`), as GPT-2 does.
    #[must_use]
    pub fn is_input_first(&self) -> bool {
        self.is_input_first
    }
}

/// Whether a setting is as if it were not there.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// The expressions of a pattern as PEFT matches them: the end of a module's name, from a dot on.
fn patterns<T>(written: IndexMap<String, T>) -> Result<Vec<(Regex, T)>, FormatError> {
    let compiled = written.into_iter().map(|(pattern, value)| {
        let expression = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"));
        let expression = expression.map_err(|_| {
            let pattern = Quoted(&pattern);
            FormatError::new(CONFIG_NAME, format!("the pattern {pattern} is no regular expression"))
        })?;
        Ok((expression, value))
    });
    compiled.collect()
}

/// The value of the first pattern that matches.
fn first_match<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(settings: &str) -> Result<AdapterConfig, String> {
        let json = format!(r#"{{"peft_type": "LORA", "r": 4, "lora_alpha": 8, {settings}}}"#);
        AdapterConfig::parse(json.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_scaling_is_by_module() {
        let config = parse(
            r#""rank_pattern": {"layers.1.q": 2, "q": 8}, "alpha_pattern": {"^model.*.k": 3}, "x": null"#,
        );
        let config = config.unwrap();
        assert_eq!((config.rank("a.layers.1.q"), config.rank("a.layers.2.q")), (2, 8));
        assert_eq!((config.rank("a.xq"), config.scaling("a.xq")), (4, 2.0));
        assert_eq!((config.scaling("model.1.k"), config.scaling("a.layers.1.q")), (0.75, 4.0));
        let stabilized = parse(r#""use_rslora": true"#).unwrap();
        assert_eq!(stabilized.scaling("q"), 4.0);
        assert_eq!(parse(r#""alpha_pattern": {"k": 3}"#).unwrap().scaling("a.k"), 0.75);
    }

    #[test]
    fn settings_of_unknown_effect_are_refused_by_name() {
        for (settings, name) in [
            (r#""layer_replication": [[0, 2]]"#, "layer_replication"),
            (r#""use_qalora": true"#, "use_qalora"),
            (r#""lora_bias": true"#, "lora_bias"),
            (r#""trainable_token_indices": [1]"#, "trainable_token_indices"),
            (r#""target_parameters": ["w"]"#, "target_parameters"),
            (r#""of_a_later_version": 1"#, "of_a_later_version"),
            (r#""init_lora_weights": "pissa_niter_4""#, "pissa"),
            (r#""rank_pattern": {"(": 2}"#, "regular expression"),
            (r#""rank_pattern": {"q": 0}"#, "rank of 0"),
        ] {
            let error = parse(settings).unwrap_err();
            assert!(error.contains(name), "{settings}: {error}");
        }
        assert!(parse(r#""init_lora_weights": "gaussian""#).is_ok());
        assert!(
            parse(r#""layer_replication": null, "use_qalora": false, "loftq_config": {}"#).is_ok()
        );
    }

    #[test]
    fn other_files_are_refused() {
        for json in [
            "",
            "[]",
            "[1]",
            "{}",
            "null",
            r#"{"peft_type": "IA3"}"#,
            r#"{"peft_type": "LORA", "r": 4}"#,
            r#"{"peft_type": "LORA", "r": -1, "lora_alpha": 1}"#,
            r#"{"peft_type": "LORA", "r": 0, "lora_alpha": 1}"#,
        ] {
            assert!(AdapterConfig::parse(json.as_bytes()).is_err(), "{json}");
        }
        assert!(AdapterConfig::parse(&[b'['; 100_000]).is_err());
    }
}
