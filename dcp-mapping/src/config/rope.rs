//! Rotary position embeddings: transformers' `rope_scaling` and Megatron's arguments.

use serde_json::{Map, Value, json};

use crate::config::incompatibilities::{differs, same};
use crate::error::MappingError;
use crate::facts::Facts;
use crate::mapping::Mapping;

impl Mapping {
    pub(crate) fn rope_of_config(
        &self,
        fields: &Map<String, Value>,
        facts: &mut Facts,
        problems: &mut Vec<MappingError>,
    ) {
        if self.config.rope.is_none() {
            return;
        }
        let parameters = fields.get("rope_parameters").and_then(Value::as_object);
        let theta = fields.get("rope_theta").or_else(|| parameters?.get("rope_theta"));
        if let Some(theta) = theta.filter(|theta| theta.is_number()) {
            facts.complete("rotary_base", theta.clone());
        }
        let scaling = fields.get("rope_scaling").and_then(Value::as_object).or(parameters);
        let Some(scaling) = scaling else { return };
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type"));
        let partial = scaling.get("partial_rotary_factor").filter(|v| v.as_f64() != Some(1.0));
        if let Some(partial) = partial.filter(|partial| !partial.is_null()) {
            let problem = "Megatron-Core turns all channels in this family";
            problems.push(differs("partial_rotary_factor", partial, problem));
        }
        let mut take = |field: &str, arg: &str| {
            if let Some(value) = scaling.get(field).filter(|value| value.is_number()) {
                facts.complete(arg, value.clone());
            }
        };
        let rope = self.config.rope.as_deref();
        match kind.and_then(Value::as_str) {
            None | Some("default") => {}
            Some("llama3") if rope == Some("llama3") => {
                take("factor", "rope_scaling_factor");
                facts.set("use_rope_scaling", true);
                for (field, number) in llama3() {
                    if let Some(value) = scaling.get(field).filter(|value| !same(value, &number)) {
                        let problem =
                            format!("Megatron-Core supports no other number than {number}");
                        problems.push(differs(field, value, &problem));
                    }
                }
            }
            Some("linear") if self.config.linear_rope() => {
                take("factor", "rotary_seq_len_interpolation_factor");
            }
            Some("yarn") if self.config.linear_rope() => {
                take("factor", "rotary_scaling_factor");
                for (field, arg) in GPT_YARN {
                    take(field, arg);
                }
                // Transformers looks at these two only where there are both.
                let both = ["mscale", "mscale_all_dim"].map(|field| {
                    scaling.get(field).and_then(Value::as_f64).filter(|scale| *scale != 0.0)
                });
                let both = match both {
                    [Some(mscale), Some(all)] => [mscale, all],
                    _ => [1.0, 0.0],
                };
                facts.set("mscale", both[0]);
                facts.set("mscale_all_dim", both[1]);
                facts.set("position_embedding_type", "yarn");
                if let Some(value) = scaling.get("attention_factor").filter(|v| !v.is_null()) {
                    let problem = "Megatron-Core works it out itself";
                    problems.push(differs("attention_factor", value, problem));
                }
                let truncate = scaling.get("truncate").and_then(Value::as_bool).unwrap_or(true);
                facts.set("yarn_correction_range_round_to_int", truncate);
                if let Some(positions) = facts.get("max_position_embeddings").cloned() {
                    facts.complete("yarn_original_max_position_embeddings", positions);
                }
                for ((_, arg), usual) in GPT_YARN.iter().zip([json!(32), json!(1)]) {
                    facts.complete(arg, usual);
                }
            }
            Some("yarn") if rope == Some("yarn") => {
                take("factor", "rotary_scaling_factor");
                for field in YARN {
                    take(field, field);
                }
                facts.set("rope_type", "yarn");
                for (field, usual) in [("attention_factor", Value::Null), ("truncate", true.into())]
                {
                    if let Some(value) = scaling.get(field).filter(|v| !v.is_null() && **v != usual)
                    {
                        problems.push(differs(field, value, "Megatron-Core works it out itself"));
                    }
                }
                // What transformers takes for what is not there.
                if let Some(positions) = facts.get("max_position_embeddings").cloned() {
                    facts.complete("original_max_position_embeddings", positions);
                }
                for (field, usual) in YARN.iter().zip(yarn_usual()) {
                    facts.complete(field, usual);
                }
            }
            Some(_) => {
                let value = Value::Object(scaling.clone());
                let problem = "Megatron-Core does not scale the positions of this family like that";
                problems.push(differs("rope_scaling", &value, problem));
            }
        }
    }

    pub(crate) fn rope_to_config(&self, facts: &Facts, config: &mut Map<String, Value>) {
        let Some(rope) = self.config.rope.as_deref() else { return };
        if let Some(base) = facts.get("rotary_base").and_then(Value::as_f64) {
            config.insert("rope_theta".to_owned(), base.into());
        }
        let factor = |name: &str| facts.get(name).and_then(Value::as_f64);
        if rope == "llama3" && facts.get_bool("use_rope_scaling") == Some(true) {
            let mut scaling = Map::new();
            scaling.insert("rope_type".to_owned(), "llama3".into());
            let scale = factor("rope_scaling_factor").unwrap_or(8.0);
            scaling.insert("factor".to_owned(), scale.into());
            scaling.extend(llama3().map(|(field, number)| {
                // NeMo has them, Megatron-LM does not.
                let stated = facts.get(&format!("rope_{field}")).cloned();
                (field.to_owned(), stated.unwrap_or(number))
            }));
            config.insert("rope_scaling".to_owned(), Value::Object(scaling));
        }
        let linear = factor("rotary_seq_len_interpolation_factor").filter(|scale| *scale != 1.0);
        if let Some(scale) = linear.filter(|_| self.config.linear_rope()) {
            let scaling = json!({ "rope_type": "linear", "factor": scale });
            config.insert("rope_scaling".to_owned(), scaling);
        }
        let Some(scale) = factor("rotary_scaling_factor").filter(|scale| *scale > 1.0) else {
            return;
        };
        if self.config.linear_rope()
            && facts.get("position_embedding_type") == Some(&Value::from("yarn"))
        {
            let mut scaling = Map::new();
            scaling.insert("rope_type".to_owned(), "yarn".into());
            scaling.insert("factor".to_owned(), scale.into());
            for (field, arg) in GPT_YARN {
                scaling.extend(facts.get(arg).map(|value| ((*field).to_owned(), value.clone())));
            }
            let two = [factor("mscale").unwrap_or(1.0), factor("mscale_all_dim").unwrap_or(0.0)];
            if two != [1.0, 0.0] {
                scaling.insert("mscale".to_owned(), two[0].into());
                scaling.insert("mscale_all_dim".to_owned(), two[1].into());
            }
            if facts.get_bool("yarn_correction_range_round_to_int") == Some(false) {
                scaling.insert("truncate".to_owned(), false.into());
            }
            config.insert("rope_scaling".to_owned(), Value::Object(scaling));
        }
        if rope == "yarn" && facts.get("rope_type") != Some(&Value::from("rope")) {
            let mut scaling = Map::new();
            // The name that it has in transformers, and that in the models' own code.
            for name in ["rope_type", "type"] {
                scaling.insert(name.to_owned(), "yarn".into());
            }
            scaling.insert("factor".to_owned(), scale.into());
            for (field, usual) in YARN.iter().zip(yarn_usual()) {
                scaling.insert((*field).to_owned(), facts.get(field).cloned().unwrap_or(usual));
            }
            config.insert("rope_scaling".to_owned(), Value::Object(scaling));
        }
    }
}

/// Megatron supports no other numbers than Llama 3.1's.
fn llama3() -> [(&'static str, Value); 3] {
    [
        ("low_freq_factor", json!(1.0)),
        ("high_freq_factor", json!(4.0)),
        ("original_max_position_embeddings", json!(8192)),
    ]
}

/// The defaults of the fields of [`YARN`].
fn yarn_usual() -> [Value; 5] {
    [json!(1.0), json!(0.0), json!(32), json!(1), json!(4096)]
}

/// Fields of YaRN, and Megatron's arguments for models without latent attention.
const GPT_YARN: &[(&str, &str)] = &[
    ("beta_fast", "yarn_beta_fast"),
    ("beta_slow", "yarn_beta_slow"),
    ("original_max_position_embeddings", "yarn_original_max_position_embeddings"),
];

/// Fields of YaRN that have one name on both sides.
const YARN: &[&str] =
    &["mscale", "mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings"];
