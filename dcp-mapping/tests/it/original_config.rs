//! The configuration of the original model is stored and restored.

use dcp_mapping::{
    Facts, MapOptions, Mapped, Mapping, MappingError, Recognition, Tying, recognize,
};
use serde_json::{Value, json};

use crate::model::Model;
use crate::support::{block_on, contents, safetensors, to_hf_of, to_megatron_of};

fn there(family: &str, config: &Value) -> Result<(Mapping, Mapped), MappingError> {
    let model = Model::all().into_iter().find(|model| model.family == family).unwrap();
    let mapping = Mapping::builtin(family).unwrap();
    let facts = mapping.facts_of_config(config)?;
    let source = safetensors(&model.tensors());
    let mapped = to_megatron_of(&source, &mapping, &facts, &MapOptions::default())?;
    Ok((mapping, mapped))
}

/// The configuration on the way back, by the arguments that the checkpoint holds.
fn back(mapping: &Mapping, mapped: &Mapped, change: impl FnOnce(Facts) -> Facts) -> Value {
    let common = block_on(dcp_jobs::read::read_object(&mapped.source, "common_state")).unwrap();
    let args = common.as_dict().unwrap().get("args").unwrap();
    let dcp_core::Value::Object(namespace) = args else { panic!("{args:?}") };
    let Some(dcp_core::Value::Dict(args)) = &namespace.state else { panic!() };
    let facts = change(Facts::from_dict(args));
    let hf = to_hf_of(&mapped.source, mapping, &facts, &MapOptions::default()).unwrap();
    mapping.config_json(&hf.facts).unwrap()
}

#[test]
fn no_field_is_lost_or_changed() {
    let more = json!({
        "bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": null, "initializer_range": 0.01,
        "attention_dropout": 0.0, "architectures": ["Mine"], "dtype": "float32",
    });
    for (family, own) in [
        ("llama", json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } })),
        ("llama", json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } })),
        ("mistral", json!({ "sliding_window": null })),
        ("mistral", json!({ "sliding_window": 4096 })),
        ("qwen2", json!({ "layer_types": ["full_attention", "full_attention", "full_attention"] })),
        ("qwen3", json!({})),
        ("mixtral", json!({ "router_jitter_noise": 0.1, "router_aux_loss_coef": 0.02 })),
        ("qwen3_moe", json!({ "norm_topk_prob": true, "decoder_sparse_step": 1 })),
        ("deepseek_v2", json!({ "topk_method": "greedy", "ep_size": 1 })),
        ("deepseek_v3", json!({ "num_nextn_predict_layers": 1 })),
        ("phi3", json!({ "sliding_window": 2047, "original_max_position_embeddings": 64 })),
        ("gpt2", json!({ "n_inner": null, "summary_type": "cls_index", "resid_pdrop": 0.1 })),
    ] {
        let mut config = Model::config_with(family, more.clone());
        if own.get("rope_parameters").is_some() {
            config.as_object_mut().unwrap().remove("rope_theta");
        }
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let (mapping, mapped) = there(family, &config).unwrap();
        assert_eq!(back(&mapping, &mapped, |facts| facts), config, "{family}");
    }
}

#[test]
fn what_was_changed_since_is_told_and_the_rest_goes_along() {
    let more = json!({
        "bos_token_id": 5, "eos_token_id": [6, 7],
        "rope_parameters": { "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4 },
        "auto_map": { "AutoConfig": "code.Config" },
        "quantization_config": { "quant_method": "fp8" },
    });
    let config = Model::config_with("llama", more);
    let (mapping, mapped) = there("llama", &config).unwrap();
    let same = back(&mapping, &mapped, |facts| facts);
    assert_eq!(same["rope_parameters"], config["rope_parameters"]);
    let changed = back(&mapping, &mapped, |facts| facts.with("rotary_base", 5e5));
    assert_eq!(changed["rope_theta"], 5e5);
    assert_eq!(changed["rope_scaling"], json!({ "rope_type": "linear", "factor": 2.0 }));
    assert_eq!(changed["eos_token_id"], json!([6, 7]));
    assert!(changed.get("rope_parameters").is_none());
    for config in [&same, &changed] {
        assert!(config.get("auto_map").is_none() && config.get("quantization_config").is_none());
        assert_eq!(config["torch_dtype"], "float32");
    }
    // An output embedding of its own.
    let mut options = MapOptions::default();
    options.tying = Tying::Untie;
    let tied = Model::all().into_iter().find(|m| m.family == "llama" && m.tied).unwrap();
    let facts = mapping.facts_of_config(&tied.config()).unwrap();
    let source = safetensors(&tied.tensors());
    let mapped = to_megatron_of(&source, &mapping, &facts, &MapOptions::default()).unwrap();
    let untied = to_hf_of(&mapped.source, &mapping, &mapped.facts, &options).unwrap();
    assert_eq!(mapping.config_json(&untied.facts).unwrap()["tie_word_embeddings"], false);
}

#[test]
fn layers_without_experts_are_compared() {
    let model = Model { qk_norm: true, experts: 3, expert_ffn: 7, ..Model::dense("qwen3_moe") };
    let model = Model { dense_layers: 2, ..model };
    let mapping = Mapping::builtin("qwen3_moe").unwrap();
    // The first says the same in other words; by the second the first layer has experts.
    for (step, only, expected) in [(3, json!([]), json!([])), (1, json!([1]), json!([0, 1]))] {
        let mut config = model.config();
        config["decoder_sparse_step"] = step.into();
        config["mlp_only_layers"] = only;
        config["num_local_experts"] = config["num_experts"].take();
        let facts = mapping.facts_of_config(&config).unwrap();
        let source = safetensors(&model.tensors());
        let mapped = to_megatron_of(&source, &mapping, &facts, &MapOptions::default()).unwrap();
        assert_eq!(back(&mapping, &mapped, |facts| facts)["mlp_only_layers"], expected);
    }
}

#[test]
fn tokens_of_another_model_are_not_taken() {
    // Transformers has a token for padding in its Phi-3, beyond smaller vocabularies.
    for family in Mapping::families() {
        let config = Model::config_with(family, json!({}));
        let (mapping, mapped) = there(family, &config).unwrap();
        let bare = back(&mapping, &mapped, |facts| facts.with("hf_config", Value::Null));
        for token in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            assert_eq!(bare.get(token), Some(&Value::Null), "{token} of {family}");
        }
    }
}

#[test]
fn a_model_is_of_the_family_that_it_came_as() {
    let config = Model::config_with("mistral", json!({ "sliding_window": null }));
    let (_, mapped) = there("mistral", &config).unwrap();
    let metadata = block_on(mapped.source.metadata()).unwrap();
    let family = |facts: &Facts| match recognize(&metadata, facts).unwrap() {
        Recognition::Found { family, because, .. } => (family, because),
        other => panic!("{other:?}"),
    };
    let (found, because) = family(&mapped.facts);
    assert_eq!(found, "mistral");
    assert!(because[0].contains("mistral"), "{because:?}");
    let phi3 = mapped.facts.clone().with("hf_config", json!({ "model_type": "phi3" }));
    assert_eq!(family(&phi3).0, "phi3");
    // What it came as is no family that is known.
    let gemma = mapped.facts.clone().with("hf_config", json!({ "model_type": "gemma2" }));
    let Recognition::Unknown { why } = recognize(&metadata, &gemma).unwrap() else { panic!() };
    assert!(why[0].1.contains("of a gemma2"), "{why:?}");
    // Without the tensors of its family it is none of them.
    let other = mapped.facts.clone().with("hf_config", json!({ "model_type": "qwen3" }));
    assert_eq!(family(&other).0, "llama");
}

#[test]
fn biases_that_megatron_has_only_together() {
    let biased = |attention: bool, mlp: bool| {
        let more = json!({ "attention_bias": attention, "mlp_bias": mlp });
        Model::config_with("llama", more)
    };
    for (config, shown) in
        [(biased(true, false), "attention_bias is true"), (biased(false, true), "mlp_bias is true")]
    {
        let error = there("llama", &config).unwrap_err();
        assert!(matches!(error, MappingError::Differs { .. }), "{error}");
        assert!(error.to_string().starts_with(shown), "{error}");
    }
    let model = Model::dense("llama");
    let mut hf = model.tensors();
    let rows: Vec<_> = hf.iter().map(|(name, tensor)| (name.clone(), tensor.shape[0])).collect();
    for (name, rows) in rows {
        if let Some(name) = name.strip_suffix("_proj.weight") {
            let bias = crate::support::Tensor::new(&[rows], |at| at[0] as u32 + 1);
            hf.insert(format!("{name}_proj.bias"), bias);
        }
    }
    let mapping = Mapping::builtin("llama").unwrap();
    let config = biased(true, true);
    let facts = mapping.facts_of_config(&config).unwrap();
    let mapped =
        to_megatron_of(&safetensors(&hf), &mapping, &facts, &MapOptions::default()).unwrap();
    assert_eq!(mapped.facts.get("add_bias_linear"), Some(&json!(true)));
    let made = contents(&mapped.source);
    assert_eq!(made["decoder.layers.mlp.linear_fc1.bias"].shape, [3, 10]);
    let back = to_hf_of(&mapped.source, &mapping, &mapped.facts, &MapOptions::default()).unwrap();
    assert!(contents(&back.source) == hf);
    assert!(back.report.notes.is_empty() || back.report.notes.len() == 1);
    let written = mapping.config_json(&back.facts).unwrap();
    assert_eq!((&written["attention_bias"], &written["mlp_bias"]), (&json!(true), &json!(true)));
    // Arguments alone give the same.
    let bare = mapped.facts.clone().with("hf_config", Value::Null);
    let back = to_hf_of(&mapped.source, &mapping, &bare, &MapOptions::default()).unwrap();
    assert_eq!(mapping.config_json(&back.facts).unwrap()["mlp_bias"], true);
}

#[test]
fn yarn_goes_both_ways_without_latent_attention() {
    for (family, scaling, scale) in [
        (
            "qwen2",
            json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16 }),
            1.0,
        ),
        (
            "llama",
            json!({ "rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "truncate": false }),
            1.0,
        ),
        (
            "qwen3",
            json!({ "rope_type": "yarn", "factor": 8, "mscale": 0.7, "mscale_all_dim": 0.5 }),
            0.7,
        ),
    ] {
        let config = Model::config_with(family, json!({ "rope_scaling": scaling }));
        let (mapping, mapped) = there(family, &config).unwrap();
        assert_eq!(mapped.facts.get("position_embedding_type"), Some(&json!("yarn")));
        assert_eq!(mapped.facts.get("mscale"), Some(&json!(scale)));
        assert_eq!(back(&mapping, &mapped, |facts| facts)["rope_scaling"], scaling, "{family}");
        // By arguments alone.
        let bare = |facts: Facts| facts.with("hf_config", Value::Null);
        let written = back(&mapping, &mapped, bare);
        let facts = mapping.facts_of_config(&written).unwrap();
        let expected = mapping.facts_of_config(&config).unwrap();
        for (name, value) in expected.values().iter().filter(|(name, _)| *name != "hf_config") {
            let found = facts.get(name).unwrap_or_else(|| panic!("{family}: {name}"));
            assert_eq!(found.as_f64(), value.as_f64(), "{family}: {name}");
        }
    }
    let scaling = json!({ "rope_type": "yarn", "factor": 2.0, "attention_factor": 0.5 });
    let config = Model::config_with("qwen2", json!({ "rope_scaling": scaling }));
    let error = there("qwen2", &config).unwrap_err();
    assert!(error.to_string().starts_with("attention_factor is 0.5"), "{error}");
}

#[test]
fn layers_for_prediction_that_are_not_there_are_no_arguments() {
    let config = Model::config_with("deepseek_v3", json!({ "num_nextn_predict_layers": 1 }));
    let (mapping, mapped) = there("deepseek_v3", &config).unwrap();
    assert_eq!(mapped.facts.get("mtp_num_layers"), None);
    let bare = back(&mapping, &mapped, |facts| facts.with("hf_config", Value::Null));
    assert_eq!(bare["num_nextn_predict_layers"], 0);
}
