//! Tensors decide the family, arguments the configuration.

use dcp_core::metadata::{Entry, TensorEntry};
use dcp_core::{CheckpointMetadata, DType};
use dcp_mapping::{
    Facts, MapOptions, Mapping, Recognition, recognize, recognize_among, recognize_config,
};
use serde_json::{Value, json};

use crate::model::Model;
use crate::support::{block_on, safetensors, stored, to_hf_of, to_megatron_of};

#[test]
fn every_family_is_recognized_by_its_weights() {
    for model in Model::all() {
        let mapping = recognize_config(&model.config()).unwrap();
        let facts = mapping.facts_of_config(&model.config()).unwrap();
        let source = safetensors(&model.tensors());
        let options = MapOptions::default();
        let mapped = to_megatron_of(&source, &mapping, &facts, &options).unwrap();
        let metadata = block_on(mapped.source.metadata()).unwrap();
        let Recognition::Found { family, because, alike } =
            recognize(&metadata, &Facts::new()).unwrap()
        else {
            panic!("{model:?}")
        };
        // Only its window distinguishes Mistral from Llama, and nothing Phi-3.
        let alike_llama = ["mistral", "phi3"].contains(&model.family);
        let expected = if alike_llama { "llama" } else { model.family };
        assert_eq!(family, expected, "{because:?}");
        assert!(alike.is_empty() && !because.is_empty());
        let windowed = Facts::new().with("window_size", json!([4095, 0]));
        let found = recognize(&metadata, &windowed).unwrap();
        if ["llama", "mistral"].contains(&model.family) {
            let Recognition::Found { family, alike, .. } = found else { panic!() };
            assert_eq!((family.as_str(), alike), ("mistral", vec!["llama".to_owned()]));
        }
    }
}

#[test]
fn real_checkpoints_are_recognized() {
    for (name, expected) in [
        ("gpt_tp2pp2_swiglu", Some("llama")),
        ("gpt_moe_ep2_swiglu", Some("mixtral")),
        ("run_torch_dist_dp2", Some("llama")),
        // Without a gate, and without the biases of GPT-2.
        ("gpt_separation_hint", None),
    ] {
        let source = stored(name);
        let metadata = block_on(source.metadata()).unwrap();
        match recognize(&metadata, &Facts::new()).unwrap() {
            Recognition::Found { family, .. } => assert_eq!(Some(family.as_str()), expected),
            Recognition::Unknown { why } => {
                assert_eq!(expected, None, "{why:?}");
                assert_eq!(why.len(), Mapping::families().len());
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn experts_and_gates_are_seen_under_all_their_names() {
    let recognized = |mlp: &[(&str, &[u64])]| {
        let mut metadata = CheckpointMetadata::new();
        let mut add = |name: &str, shape: &[u64]| {
            metadata.insert(name, Entry::Tensor(TensorEntry::new(DType::Float32, shape)));
        };
        add("embedding.word_embeddings.weight", &[16, 8]);
        for layer in 0..2 {
            let layer = format!("decoder.layers.{layer}");
            add(&format!("{layer}.self_attention.linear_qkv.weight"), &[12, 8]);
            for (name, shape) in mlp {
                add(&format!("{layer}.mlp.{name}"), shape);
            }
        }
        match recognize(&metadata, &Facts::new()).unwrap() {
            Recognition::Found { family, .. } => family,
            other => panic!("{other:?}"),
        }
    };
    let halves: [(&str, &[u64]); 3] = [
        ("linear_fc1.weight_w", &[7, 8]),
        ("linear_fc1.weight_v", &[7, 8]),
        ("linear_fc2.weight", &[8, 7]),
    ];
    assert_eq!(recognized(&halves), "llama");
    for (up, down) in [
        ("experts.experts.linear_fc1.weight", "experts.experts.linear_fc2.weight"),
        ("experts.local_experts.1.linear_fc1.weight", "experts.local_experts.1.linear_fc2.weight"),
        ("experts.linear_fc1.weight1", "experts.linear_fc2.weight1"),
    ] {
        let stacked = up.contains("experts.experts");
        let (ups, downs): (&[u64], &[u64]) =
            if stacked { (&[2, 14, 8], &[2, 8, 7]) } else { (&[14, 8], &[8, 7]) };
        assert_eq!(recognized(&[("router.weight", &[2, 8]), (up, ups), (down, downs)]), "mixtral");
    }
}

#[test]
fn configurations_come_back() {
    for model in Model::all() {
        let mapping = Mapping::builtin(model.family).unwrap();
        let facts = mapping.facts_of_config(&model.config()).unwrap();
        let source = safetensors(&model.tensors());
        let options = MapOptions::default();
        let there = to_megatron_of(&source, &mapping, &facts, &options).unwrap();
        let back = to_hf_of(&there.source, &mapping, &there.facts, &options);
        let config = mapping.config_json(&back.unwrap().facts).unwrap();
        for (field, value) in model.config().as_object().unwrap() {
            if *value == Value::Null {
                assert!(config.get(field).is_none_or(Value::is_null), "{field} of {model:?}");
            } else if !(model.family == "mixtral" && field == "num_experts") {
                assert_eq!(config[field], *value, "{field} of {model:?}");
            }
        }
        assert!(config["architectures"][0].is_string());
        assert_eq!(config["torch_dtype"], "float32");
    }
}

#[test]
fn what_configurations_say_in_many_words() {
    let llama = Mapping::builtin("llama").unwrap();
    let scaling = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    // As transformers 4 and 5 write it.
    for config in [
        json!({ "rope_theta": 500000.0, "rope_scaling": scaling }),
        json!({ "rope_parameters": {
            "rope_theta": 500000.0, "rope_type": "llama3", "factor": 32.0,
        } }),
    ] {
        let facts = llama.facts_of_config(&Model::config_with("llama", config)).unwrap();
        assert_eq!(facts.get("rotary_base"), Some(&json!(500000.0)));
        assert_eq!(facts.get("use_rope_scaling"), Some(&json!(true)));
        let back = llama.config_json(&facts.with("hf_config", json!(null))).unwrap();
        assert_eq!(back["rope_scaling"], scaling);
        assert_eq!(back["rope_theta"], 500000.0);
    }
    let mistral = Mapping::builtin("mistral").unwrap();
    for (window, size) in [(json!(4096), Some(json!([4095, 0]))), (json!(null), None)] {
        let facts = {
            let config = Model::config_with("mistral", json!({ "sliding_window": window }));
            mistral.facts_of_config(&config).unwrap()
        };
        assert_eq!(facts.get("window_size"), size.as_ref());
        // Where transformers finds nothing, it takes 4096.
        assert_eq!(mistral.config_json(&facts).unwrap()["sliding_window"], window);
    }
    let deepseek = Mapping::builtin("deepseek_v3").unwrap();
    let scaling = json!({
        "rope_type": "yarn", "type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
        "beta_slow": 1, "original_max_position_embeddings": 4096,
    });
    let config = Model::config_with("deepseek_v3", json!({ "rope_scaling": scaling }));
    let facts = deepseek.facts_of_config(&config).unwrap();
    assert_eq!(deepseek.config_json(&facts).unwrap()["rope_scaling"], scaling);
    let facts = Facts::new().with("moe_layer_freq", json!([0, 1, 0, 1]));
    let error = deepseek.config_json(&facts).unwrap_err().to_string();
    assert!(error.contains("moe_layer_freq is [0,1,0,1]"), "{error}");
    let facts = facts.with("moe_layer_freq", json!([0, 1])).with("moe_ffn_hidden_size", 3);
    let facts = facts.with("moe_shared_expert_intermediate_size", 7);
    let error = deepseek.config_json(&facts).unwrap_err().to_string();
    assert!(error.contains("not a multiple of the experts' size, 3"), "{error}");
    assert!(llama.facts_of_config(&json!([])).is_err());
    assert!(recognize_config(&json!({ "model_type": "bert" })).is_err());
}

#[test]
fn arguments_mean_what_megatron_makes_of_them() {
    let args = |json: Value| Facts::from_args(json.as_object().unwrap().clone());
    // Without grouped queries the number of groups stays at its default.
    let facts = args(json!({
        "num_attention_heads": 8, "num_query_groups": 1, "group_query_attention": false,
        "tokenizer_type": "NullTokenizer", "vocab_size": 15, "q_lora_rank": null,
    }));
    assert_eq!(facts.get("num_query_groups"), Some(&json!(8)));
    assert_eq!(facts.get("vocab_size"), Some(&json!(16)));
    assert_eq!(facts.get("q_lora_rank"), None);
}

#[test]
fn what_may_be_of_two_families_is_of_neither() {
    let mine = |name: &str, recognize: &str| {
        let rule = "[[rule]]\nhf = \"a\"\nmegatron = \"b\"";
        let text = format!("[family]\nname = {name:?}\n[recognize]\n{recognize}\n{rule}");
        Mapping::parse(&text, "mine.toml").unwrap()
    };
    let embedding = "has = [\"embedding.word_embeddings.weight\"]";
    let all = [
        mine("one", embedding),
        mine("two", embedding),
        mine("three", "gated = false"),
        mine("four", "args = { swiglu = true }"),
        mine("five", ""),
    ];
    let metadata = block_on(stored("gpt_tp2pp2_swiglu").metadata()).unwrap();
    let found = recognize_among(&all, &metadata, &Facts::new());
    let Recognition::Ambiguous { candidates, why } = found else { panic!("{found:?}") };
    assert_eq!(candidates, ["one", "two"]);
    assert_eq!(why, "there is embedding.word_embeddings.weight");
    let Recognition::Unknown { why } = recognize_among(&all[2..], &metadata, &Facts::new()) else {
        panic!()
    };
    let why: Vec<_> = why.iter().map(|(_, problem)| problem.as_str()).collect();
    assert_eq!(
        why,
        [
            "the MLP is gated",
            "the argument swiglu is not set",
            "it says nothing of how to recognize it"
        ]
    );
}
