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
    peft_type: String,
    r: Option<Value>,
    lora_alpha: Option<Value>,
    #[serde(default)]
    rank_pattern: Option<IndexMap<String, Value>>,
    #[serde(default)]
    alpha_pattern: Option<IndexMap<String, Value>>,
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

/// The field that makes a file a configuration of PEFT.
#[derive(Deserialize)]
struct Typed {
    #[serde(rename = "peft_type")]
    _peft_type: String,
}

fn bad(problem: impl Into<String>) -> FormatError {
    FormatError::new(CONFIG_NAME, problem.into())
}

impl AdapterConfig {
    /// The maximum size of the file in bytes; longer ones are not read.
    pub const BYTES_MAX: u64 = 4 << 20;

    /// Fails for what is no configuration of an adapter of any type.
    ///
    /// # Errors
    ///
    /// When it is no JSON object with a `peft_type`.
    pub fn refuse_damaged(json: &[u8]) -> Result<(), FormatError> {
        let start = json.iter().find(|byte| !byte.is_ascii_whitespace());
        if start.is_some_and(|byte| *byte != b'{') {
            return Err(bad("it is no JSON object"));
        }
        let typed: Result<Typed, _> = serde_json::from_slice(json);
        typed.map(drop).map_err(|error| bad(error.to_string()))
    }

    /// Parses an `adapter_config.json`.
    ///
    /// # Errors
    ///
    /// When it is not the configuration of a LoRA adapter, or has a setting that changes the merged weights in
    /// a way that is not known. Settings of later versions of PEFT are accepted where they are off.
    pub fn parse(json: &[u8]) -> Result<Self, FormatError> {
        Self::refuse_damaged(json)?;
        let file: File = serde_json::from_slice(json).map_err(|error| bad(error.to_string()))?;
        if file.peft_type != "LORA" {
            return Err(bad(format!(
                "it is of an adapter of type {}, not LORA",
                Quoted(&file.peft_type)
            )));
        }
        let unknown = |(name, value): (&String, &Value)| {
            (!WITHOUT_EFFECT.contains(&&**name) && !is_off(value)).then(|| name.clone())
        };
        if let Some(name) = file.rest.iter().find_map(unknown) {
            let name = Quoted(&name);
            return Err(bad(format!(
                "the setting {name} changes the merged weights in a way that is not known"
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
            return Err(bad("it has no r or no lora_alpha"));
        };
        let config = Self {
            rank: rank_of("r", &rank)?,
            alpha: alpha_of("lora_alpha", &alpha)?,
            ranks: patterns(file.rank_pattern, rank_of)?,
            alphas: patterns(file.alpha_pattern, alpha_of)?,
            is_rank_stabilized: file.use_rslora,
            has_magnitudes: file.use_dora,
            is_input_first: file.fan_in_fan_out,
        };
        Ok(config)
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

/// The rank that a setting has.
fn rank_of(setting: &str, value: &Value) -> Result<u64, FormatError> {
    let rank = value.as_u64().filter(|rank| *rank > 0);
    rank.ok_or_else(|| bad(format!("the rank {} is {value}, no positive number", Quoted(setting))))
}

/// The alpha that a setting has. The factor of a product is a `float32`, whatever its rank.
fn alpha_of(setting: &str, value: &Value) -> Result<f64, FormatError> {
    let alpha = value.as_f64().filter(|alpha| (*alpha as f32).is_finite());
    alpha.ok_or_else(|| bad(format!("the alpha {} is {value}, no float32", Quoted(setting))))
}

/// The expressions of a pattern as PEFT matches them: the end of a module's name, from a dot on.
fn patterns<T>(
    written: Option<IndexMap<String, Value>>,
    value_of: impl Fn(&str, &Value) -> Result<T, FormatError>,
) -> Result<Vec<(Regex, T)>, FormatError> {
    let compiled = written.unwrap_or_default().into_iter().map(|(pattern, value)| {
        let value = value_of(&pattern, &value)?;
        let expression = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"));
        let expression = expression.map_err(|_| {
            bad(format!(
                "the pattern {} cannot be read; of Python's expressions, look-ahead, look-behind and \
                 back-references are not supported",
                Quoted(&pattern)
            ))
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
            (r#""rank_pattern": {"(?!k)q": 2}"#, "(?!k)q"),
            (r#""rank_pattern": {"q": 0}"#, "the rank \"q\" is 0"),
            (r#""alpha_pattern": {"q": 1e300}"#, "the alpha \"q\" is 1e+300"),
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

    /// An adapter that cannot be merged is no damaged one.
    #[test]
    fn what_is_not_merged_is_whole() {
        for json in [
            r#"{"peft_type": "IA3", "target_modules": ["k"]}"#,
            r#"{"peft_type": "LORA", "r": "4", "lora_alpha": 8}"#,
            r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_bias": true}"#,
        ] {
            assert!(AdapterConfig::refuse_damaged(json.as_bytes()).is_ok(), "{json}");
            assert!(AdapterConfig::parse(json.as_bytes()).is_err(), "{json}");
        }
        for json in ["", "{", "[]", "{}", r#"{"peft_type": 1}"#, r#"{"peft_type": "LORA""#] {
            assert!(AdapterConfig::refuse_damaged(json.as_bytes()).is_err(), "{json}");
        }
    }
}
