//! Settings that the other side cannot express.

use serde_json::{Map, Value};

use crate::error::MappingError;
use crate::facts::Facts;
use crate::mapping::Mapping;

/// A value that changes nothing: that of a plain model. One that is not there never does.
enum Plain {
    /// False, zero, empty, or a list of such.
    Off,
    On,
    Number(f64),
    /// One of these, or a list of them.
    Text(&'static [&'static str]),
    /// A window without an edge.
    Window,
}

/// Megatron's arguments (of 0.6 to 0.20) that no model of transformers known here follows, but for
/// families whose `[config]` speaks of them.
const ARGUMENTS: &[(&str, Plain)] = &[
    ("activation_func_clamp_value", Plain::Off),
    ("attention_scale", Plain::Off),
    ("experimental_attention_variant", Plain::Off),
    ("glu_linear_offset", Plain::Off),
    ("heterogeneous_layers_config_encoded_json", Plain::Off),
    ("heterogeneous_layers_config_path", Plain::Off),
    ("hybrid_override_pattern", Plain::Off),
    ("is_hybrid_model", Plain::Off),
    ("linear_attention_freq", Plain::Off),
    ("moe_apply_probs_on_input", Plain::Off),
    ("moe_latent_size", Plain::Off),
    ("moe_router_enable_expert_bias", Plain::Off),
    ("moe_router_group_topk", Plain::Number(1.0)),
    ("moe_router_load_balancing_type", BALANCING),
    ("moe_router_num_groups", Plain::Number(1.0)),
    ("moe_router_topk_limited_devices", Plain::Off),
    ("moe_router_topk_scaling_factor", Plain::Number(1.0)),
    ("moe_shared_expert_gate", Plain::Off),
    ("no_rope_freq", Plain::Off),
    ("qk_l2_norm", Plain::Off),
    ("quick_geglu", Plain::Off),
    ("rotary_percent", Plain::Number(1.0)),
    ("rotary_seq_len_interpolation_factor", Plain::Number(1.0)),
    ("softmax_scale", Plain::Off),
    ("softmax_type", Plain::Text(&["vanilla"])),
    ("squared_relu", Plain::Off),
    ("use_rope_scaling", Plain::Off),
    ("window_attn_skip_freq", Plain::Off),
    ("window_size", Plain::Window),
];

/// Losses: how tokens are routed stays the same.
const BALANCING: Plain = Plain::Text(&["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]);

/// Fields of `config.json` that Megatron has no argument for that does the same.
const FIELDS: &[(&str, Plain)] = &[
    ("add_cross_attention", Plain::Off),
    ("attn_logit_softcapping", Plain::Off),
    ("final_logit_softcapping", Plain::Off),
    ("layer_types", Plain::Text(&["full_attention"])),
    ("partial_rotary_factor", Plain::Number(1.0)),
    ("rope_interleave", Plain::On),
    ("scale_attn_by_inverse_layer_idx", Plain::Off),
    ("scale_attn_weights", Plain::On),
    ("use_sliding_window", Plain::Off),
];

impl Plain {
    fn is(&self, value: &Value) -> bool {
        let all = |is: &dyn Fn(&Value) -> bool| match value {
            Value::Null => true,
            Value::Array(values) => values.iter().all(is),
            value => is(value),
        };
        match self {
            Self::Off => all(&|value| {
                value.as_bool() == Some(false)
                    || value.as_f64() == Some(0.0)
                    || value.as_str() == Some("")
            }),
            Self::On => value.is_null() || value.as_bool() == Some(true),
            Self::Number(number) => {
                value.is_null() || value.as_bool() == Some(false) || value.as_f64() == Some(*number)
            }
            Self::Text(texts) => all(&|value| value.as_str().is_some_and(|t| texts.contains(&t))),
            Self::Window => {
                let before = value.get(0).and_then(Value::as_i64);
                value.is_null() || before.is_some_and(|before| before < 0)
            }
        }
    }
}

impl Mapping {
    /// Lists the arguments of a checkpoint that a model of this family in transformers does not
    /// support.
    pub(crate) fn beyond_hf(&self, facts: &Facts) -> Result<Vec<MappingError>, MappingError> {
        let mut found = Vec::new();
        for (arg, plain) in ARGUMENTS {
            if let Some(value) = facts.get(arg).filter(|value| !plain.is(value))
                && !self.speaks_of(arg)
            {
                let problem = format!(
                    "models of the family {:?} in transformers have nothing like it",
                    self.name()
                );
                found.push(differs(arg, value, &problem));
            }
        }
        for (arg, usual) in &self.config.args {
            if arg == "position_embedding_type"
                && self.config.linear_rope()
                && facts.get(arg).is_some_and(|value| value == "yarn")
            {
                continue;
            }
            if let Some(value) = facts.get(arg).filter(|value| !same(value, usual)) {
                let problem =
                    format!("models of the family {:?} have {usual} in transformers", self.name());
                found.push(differs(arg, value, &problem));
            }
        }
        let factor = facts.get("rotary_seq_len_interpolation_factor");
        if let Some(factor) = factor.filter(|factor| !Plain::Number(1.0).is(factor))
            && facts.get_bool("use_rope_scaling") == Some(true)
        {
            let problem = "transformers does not scale positions in two ways (use_rope_scaling)";
            found.push(differs("rotary_seq_len_interpolation_factor", factor, problem));
        }
        found.extend(self.groups_differ(facts)?);
        Ok(found)
    }

    /// Lists the fields of a `config.json` that Megatron does not support.
    pub(crate) fn beyond_megatron(&self, fields: &Map<String, Value>) -> Vec<MappingError> {
        let mut found = Vec::new();
        for (field, plain) in FIELDS {
            if let Some(value) = fields.get(*field).filter(|value| !plain.is(value)) {
                found.push(differs(field, value, "Megatron-Core has no argument for that"));
            }
        }
        for (field, usual) in &self.config.constants {
            if ["architectures", "model_type"].contains(&field.as_str()) {
                continue;
            }
            if let Some(value) = fields.get(field).filter(|value| !same(value, usual)) {
                let problem = format!(
                    "of models of the family {:?} only those with {usual} can be mapped",
                    self.name()
                );
                found.push(differs(field, value, &problem));
            }
        }
        found
    }

    /// Megatron's attention has a bias behind it where its MLP has biases, and only there.
    pub(crate) fn biases_differ(&self, facts: &Facts) -> Option<MappingError> {
        let fields = &self.config.fields;
        let field = |arg: &str| fields.iter().find(|(_, known)| *known == arg).map(|(f, _)| f);
        let (attention, mlp) = (field("add_qkv_bias")?, field("add_bias_linear")?);
        let on = |arg: &str| facts.get_bool(arg).unwrap_or(false);
        let (has, lacks) = match (on("add_qkv_bias"), on("add_bias_linear")) {
            (true, false) => (attention, mlp),
            (false, true) => (mlp, attention),
            _ => return None,
        };
        let problem = format!("Megatron-Core has such biases only with those of {lacks}");
        Some(differs(has, &true.into(), &problem))
    }

    /// Whether both sides choose groups of experts alike.
    pub(crate) fn groups_differ(
        &self,
        facts: &Facts,
    ) -> Result<Option<MappingError>, MappingError> {
        let Some(scored) = self.config.group_score else { return Ok(None) };
        let groups = facts.get_u64("moe_router_num_groups")?.unwrap_or(1);
        let chosen = facts.get_u64("moe_router_group_topk")?.unwrap_or(groups);
        if chosen >= groups {
            return Ok(None);
        }
        let topk = facts.get_u64("moe_router_topk")?;
        let experts = topk.and_then(|topk| topk.checked_div(chosen));
        if experts == Some(scored) {
            return Ok(None);
        }
        let problem = format!(
            "Megatron-Core scores a group by its best moe_router_topk / moe_router_group_topk \
             experts ({}), transformers by its best {scored} in the family {:?}",
            experts.map_or_else(|| "unknown".to_owned(), |experts| experts.to_string()),
            self.name()
        );
        Ok(Some(differs("moe_router_group_topk", &chosen.into(), &problem)))
    }

    /// Whether `[config]` maps an argument.
    fn speaks_of(&self, arg: &str) -> bool {
        let config = &self.config;
        config.fields.values().any(|known| known.strip_prefix('!').unwrap_or(known) == arg)
            || config.args.contains_key(arg)
            || config.usual.contains_key(arg)
            || match arg {
                "window_size" => config.window,
                "use_rope_scaling" => config.rope.as_deref() == Some("llama3"),
                "rotary_seq_len_interpolation_factor" => config.linear_rope(),
                _ => false,
            }
    }
}

/// Refuses what differs, or only says so.
pub(crate) fn settle(
    found: Vec<MappingError>,
    ignore: bool,
    notes: &mut Vec<String>,
) -> Result<(), MappingError> {
    if ignore {
        notes.extend(found.iter().map(|problem| format!("ignored: {problem}")));
        return Ok(());
    }
    found.into_iter().next().map_or(Ok(()), Err)
}

pub(crate) fn differs(name: &str, value: &Value, problem: &str) -> MappingError {
    let (fact, value) = (name.to_owned(), value.to_string());
    MappingError::Differs { fact, value, problem: problem.to_owned() }
}

pub(crate) fn same(one: &Value, other: &Value) -> bool {
    one == other || matches!((one.as_f64(), other.as_f64()), (Some(a), Some(b)) if a == b)
}
