//! What the other side cannot say is refused, or passes with a note on request.

use dcp_jobs::Source;
use dcp_mapping::{Facts, MapOptions, Mapped, Mapping, MappingError};
use serde_json::{Value, json};

use crate::model::Model;
use crate::support::{safetensors, to_hf_of, to_megatron_of};

/// A model of a family in Megatron.
fn megatron(family: &str) -> (Mapping, Mapped) {
    let model = Model::all().into_iter().find(|model| model.family == family).unwrap();
    let mapping = Mapping::builtin(family).unwrap();
    let facts = mapping.facts_of_config(&model.config()).unwrap();
    let source = safetensors(&model.tensors());
    let mapped = to_megatron_of(&source, &mapping, &facts, &MapOptions::default()).unwrap();
    (mapping, mapped)
}

fn to_hf(
    source: &Source,
    mapping: &Mapping,
    facts: &Facts,
    ignore: bool,
) -> Result<Mapped, MappingError> {
    let mut options = MapOptions::default();
    options.ignore_arguments = ignore;
    to_hf_of(source, mapping, facts, &options)
}

#[test]
fn arguments_that_transformers_does_not_follow() {
    for (family, arg, value) in [
        ("llama", "rotary_percent", json!(0.5)),
        ("llama", "no_rope_freq", json!([0, 0, 0, 1])),
        ("llama", "softmax_type", json!("learnable")),
        ("llama", "qk_l2_norm", json!(true)),
        ("llama", "glu_linear_offset", json!(1.0)),
        ("llama", "activation_func_clamp_value", json!(7.0)),
        ("llama", "window_size", json!([4095, 0])),
        ("llama", "position_embedding_type", json!("none")),
        ("llama", "swiglu", json!(false)),
        ("llama", "normalization", json!("LayerNorm")),
        ("mistral", "window_attn_skip_freq", json!(4)),
        ("mistral", "quick_geglu", json!(true)),
        ("qwen2", "use_rope_scaling", json!(true)),
        ("qwen3", "softmax_scale", json!(0.1)),
        ("deepseek_v2", "rotary_seq_len_interpolation_factor", json!(8)),
        ("deepseek_v2", "moe_router_pre_softmax", json!(false)),
        ("deepseek_v2", "moe_router_score_function", json!("sigmoid")),
        ("deepseek_v2", "moe_router_enable_expert_bias", json!(true)),
        ("deepseek_v3", "moe_router_score_function", json!("softmax")),
        ("mixtral", "moe_router_pre_softmax", json!(true)),
        ("mixtral", "moe_router_score_function", json!("sigmoid")),
        ("mixtral", "moe_router_topk_scaling_factor", json!(2.5)),
        ("mixtral", "moe_router_load_balancing_type", json!("sinkhorn")),
        ("mixtral", "moe_apply_probs_on_input", json!(true)),
        ("qwen3_moe", "moe_router_num_groups", json!(4)),
        ("qwen3_moe", "moe_router_score_function", json!("sigmoid")),
        ("gpt2", "squared_relu", json!(true)),
        ("gpt2", "group_query_attention", json!(true)),
    ] {
        let (mapping, there) = megatron(family);
        let facts = there.facts.clone().with(arg, value.clone());
        let error = to_hf(&there.source, &mapping, &facts, false).unwrap_err();
        assert!(matches!(error, MappingError::Differs { .. }), "{error}");
        let shown = format!("{arg} is {value}: ");
        assert!(error.to_string().starts_with(&shown), "{error}");
        let passed = to_hf(&there.source, &mapping, &facts, true).unwrap();
        let noted = passed.report.notes.iter().any(|note| note.contains(&shown));
        assert!(noted, "{:?}", passed.report.notes);
    }
}

#[test]
fn arguments_that_change_nothing_pass() {
    for (family, arg, value) in [
        ("llama", "rotary_percent", json!(1)),
        ("llama", "no_rope_freq", json!([0, 0])),
        ("llama", "rotary_seq_len_interpolation_factor", json!(null)),
        ("llama", "window_size", json!([-1, -1])),
        ("llama", "softmax_type", json!("vanilla")),
        ("llama", "glu_linear_offset", json!(0.0)),
        ("mixtral", "moe_router_topk_scaling_factor", json!(1.0)),
        ("mixtral", "moe_router_load_balancing_type", json!(["aux_loss", "global_aux_loss"])),
        ("deepseek_v3", "moe_router_topk_scaling_factor", json!(2.5)),
    ] {
        let (mapping, there) = megatron(family);
        let facts = there.facts.clone().with(arg, value.clone());
        let back = to_hf(&there.source, &mapping, &facts, false).unwrap();
        assert!(back.report.notes.is_empty(), "{arg}: {:?}", back.report.notes);
    }
    // The tensors and the scores do not depend on it.
    let (mapping, there) = megatron("deepseek_v3");
    let facts = there.facts.clone().with("moe_router_pre_softmax", false);
    let back = to_hf(&there.source, &mapping, &facts, false).unwrap();
    assert!(back.report.notes[0].contains("moe_router_pre_softmax"), "{:?}", back.report.notes);
}

/// What `cargo xtask interop` finds the same in transformers.
#[test]
fn fields_that_are_not_there_are_those_of_transformers() {
    for (family, fields, arg, value) in [
        ("mistral", vec!["num_key_value_heads"], "num_query_groups", json!(8)),
        ("mixtral", vec!["num_key_value_heads"], "num_query_groups", json!(8)),
        ("llama", vec!["num_key_value_heads"], "num_query_groups", json!(6)),
        (
            "qwen2",
            vec!["num_key_value_heads", "num_attention_heads"],
            "num_query_groups",
            json!(32),
        ),
        ("qwen3_moe", vec!["num_key_value_heads"], "num_query_groups", json!(4)),
        ("qwen3_moe", vec!["router_aux_loss_coef"], "moe_aux_loss_coeff", json!(0.001)),
        ("gpt2", vec!["n_head"], "num_attention_heads", json!(12)),
        ("gpt2", vec![], "untie_embeddings_and_output_weights", json!(false)),
        ("llama", vec!["tie_word_embeddings"], "untie_embeddings_and_output_weights", json!(true)),
        ("deepseek_v3", vec!["v_head_dim"], "v_head_dim", json!(128)),
        ("deepseek_v2", vec!["qk_nope_head_dim"], "qk_head_dim", json!(128)),
    ] {
        let mut config = Model::config_with(family, json!({}));
        for field in &fields {
            config.as_object_mut().unwrap().remove(*field);
        }
        let facts = Mapping::builtin(family).unwrap().facts_of_config(&config).unwrap();
        assert_eq!(facts.get(arg), Some(&value), "{family} without {fields:?}");
    }
    // Null is no lack.
    let config = Model::config_with("mistral", json!({ "num_key_value_heads": null }));
    let facts = Mapping::builtin("mistral").unwrap().facts_of_config(&config).unwrap();
    assert_eq!(facts.get("num_query_groups"), Some(&json!(6)));
}

#[test]
fn configurations_that_megatron_does_not_follow() {
    for (family, more, shown) in [
        ("llama", json!({ "hidden_act": "gelu" }), "hidden_act is \"gelu\""),
        ("llama", json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor is 0.5"),
        ("llama", json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }), "rope_scaling"),
        ("mixtral", json!({ "rope_scaling": { "type": "longrope" } }), "rope_scaling"),
        // There it is another name of longrope.
        ("phi3", json!({ "rope_scaling": { "type": "yarn", "factor": 2.0 } }), "rope_scaling"),
        (
            "llama",
            json!({ "rope_parameters": { "rope_theta": 1e4, "partial_rotary_factor": 0.5 } }),
            "partial_rotary_factor is 0.5",
        ),
        (
            "llama",
            json!({ "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0,
            } }),
            "low_freq_factor is 2.0",
        ),
        ("qwen2", json!({ "use_sliding_window": true }), "use_sliding_window is true"),
        ("qwen3", json!({ "layer_types": ["sliding_attention"] }), "layer_types is"),
        ("qwen3", json!({ "attention_bias": true }), "attention_bias is true"),
        ("deepseek_v2", json!({ "norm_topk_prob": true }), "norm_topk_prob is true"),
        ("deepseek_v2", json!({ "topk_method": "noaux_tc" }), "topk_method is \"noaux_tc\""),
        ("deepseek_v3", json!({ "scoring_func": "softmax" }), "scoring_func is \"softmax\""),
        ("deepseek_v3", json!({ "rope_interleave": false }), "rope_interleave is false"),
        ("gpt2", json!({ "activation_function": "relu" }), "activation_function is \"relu\""),
        ("gpt2", json!({ "scale_attn_by_inverse_layer_idx": true }), "scale_attn_by_inverse"),
    ] {
        let mapping = Mapping::builtin(family).unwrap();
        let config = Model::config_with(family, more);
        let error = mapping.facts_of_config(&config).unwrap_err();
        assert!(matches!(error, MappingError::Differs { .. }), "{error}");
        assert!(error.to_string().starts_with(shown), "{error}");
        let (_, notes) = mapping.read_config(&config, true).unwrap();
        assert!(notes.len() == 1 && notes[0].contains(shown), "{notes:?}");
    }
}

#[test]
fn what_a_configuration_lacks_is_what_transformers_takes() {
    for (family, field, arg, expected) in [
        ("llama", "rms_norm_eps", "layernorm_epsilon", json!(1e-6)),
        ("mixtral", "rms_norm_eps", "layernorm_epsilon", json!(1e-5)),
        ("mixtral", "rope_theta", "rotary_base", json!(1e6)),
        ("mistral", "sliding_window", "window_size", json!([4095, 0])),
        ("qwen3_moe", "norm_topk_prob", "moe_router_pre_softmax", json!(true)),
        ("deepseek_v3", "topk_group", "moe_router_group_topk", json!(4)),
        ("deepseek_v3", "routed_scaling_factor", "moe_router_topk_scaling_factor", json!(2.5)),
        ("gpt2", "layer_norm_epsilon", "layernorm_epsilon", json!(1e-5)),
        ("gpt2", "activation_function", "openai_gelu", json!(true)),
    ] {
        let mapping = Mapping::builtin(family).unwrap();
        let mut config = Model::config_with(family, json!({}));
        config.as_object_mut().unwrap().remove(field);
        let facts = mapping.facts_of_config(&config).unwrap();
        assert_eq!(facts.get(arg), Some(&expected), "{field} of {family}");
    }
}

#[test]
fn gpt2_has_the_gelu_that_it_was_trained_with() {
    let (mapping, there) = megatron("gpt2");
    let written = |openai: Value, fused: Value| {
        let facts = there.facts.clone().with("hf_config", json!(null));
        let facts = facts.with("openai_gelu", openai);
        mapping.config_json(&facts.with("bias_gelu_fusion", fused))
    };
    for (openai, fused, expected) in [
        (json!(true), json!(false), "gelu_new"),
        (json!(false), json!(true), "gelu_new"),
        (json!(false), json!(false), "gelu"),
        (json!(null), json!(false), "gelu"),
    ] {
        assert_eq!(written(openai, fused).unwrap()["activation_function"], expected);
    }
    let error = written(json!(null), json!(null)).unwrap_err().to_string();
    assert!(error.contains("needs activation_function"), "{error}");
    let config = Model::config_with("gpt2", json!({ "activation_function": "gelu" }));
    let facts = mapping.facts_of_config(&config).unwrap();
    assert_eq!(facts.get("bias_gelu_fusion"), Some(&json!(false)));
}

#[test]
fn positions_are_interpolated_on_both_sides() {
    let mapping = Mapping::builtin("qwen2").unwrap();
    let scaling = json!({ "rope_type": "linear", "factor": 8.0 });
    let config = Model::config_with("qwen2", json!({ "rope_scaling": scaling }));
    let facts = mapping.facts_of_config(&config).unwrap();
    assert_eq!(facts.get("rotary_seq_len_interpolation_factor"), Some(&json!(8.0)));
    assert_eq!(mapping.config_json(&facts).unwrap()["rope_scaling"], scaling);
}

#[test]
fn groups_of_experts_are_scored_alike_or_refused() {
    let groups = json!({ "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy" });
    for (family, topk, fits) in
        [("deepseek_v2", 2, true), ("deepseek_v2", 4, false), ("deepseek_v2", 6, false)]
    {
        let mapping = Mapping::builtin(family).unwrap();
        let mut config = Model::config_with(family, groups.clone());
        config["num_experts_per_tok"] = json!(topk);
        assert_eq!(mapping.facts_of_config(&config).is_ok(), fits, "{family} {topk}");
        // Without it there are no groups, whatever else is said.
        config["topk_method"] = json!("greedy");
        let facts = mapping.facts_of_config(&config).unwrap();
        assert_eq!(facts.get("moe_router_num_groups"), None);
    }
    let (mapping, there) = megatron("deepseek_v3");
    for (topk, fits) in [(4, true), (2, false), (6, false)] {
        let facts = there.facts.clone().with("moe_router_topk", topk);
        let facts = facts.with("moe_router_num_groups", 4).with("moe_router_group_topk", 2);
        let back = to_hf(&there.source, &mapping, &facts, false);
        assert_eq!(back.is_ok(), fits, "{topk}");
    }
}
