//! What Megatron-Bridge and NeMo write of a model beside its checkpoint.

use dcp_mapping::{Facts, MapOptions, Mapping, Recognition, recognize};
use serde_json::{Value, json};

use crate::model::Model;
use crate::support::{block_on, safetensors, to_hf_of, to_megatron_of};

const BRIDGE: &str = "\
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  save: /runs/a
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: false
  attention_backend:
    _args_:
    - 5
    _call_: true
    _name_: auto
    _target_: megatron.core.transformer.enums.AttnBackend
  ffn_hidden_size: 5
  gated_linear_unit: true
  generation_config: null
  hidden_size: 8
  kv_channels: 4
  layernorm_epsilon: 1.0e-05
  make_vocab_size_divisible_by: 128
  normalization: RMSNorm
  num_attention_heads: 6
  num_layers: 3
  num_moe_experts: null
  num_query_groups: 2
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  position_embedding_type: rope
  rope_scaling: true
  rope_scaling_factor: 32.0
  rotary_base: 500000.0
  rotary_percent: 1.0
  seq_length: 4096
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 1
  transformer_layer_spec:
    _call_: false
    _target_: megatron.bridge.models.gpt_provider.default_layer_spec
  vocab_size: 11
  window_size: null
";

#[test]
fn a_configuration_of_the_bridge_tells_what_arguments_do() {
    let facts = Facts::from_run_config(BRIDGE, "run_config.yaml").unwrap();
    for (name, value) in [
        ("swiglu", json!(true)),
        ("untie_embeddings_and_output_weights", json!(true)),
        ("use_rope_scaling", json!(true)),
        ("rope_scaling_factor", json!(32.0)),
        ("params_dtype", json!("torch.bfloat16")),
        ("max_position_embeddings", json!(4096)),
        ("group_query_attention", json!(true)),
        ("num_query_groups", json!(2)),
        ("attention_backend", json!(5)),
    ] {
        assert_eq!(facts.get(name), Some(&value), "{name}");
    }
    assert_eq!(facts.get("num_experts"), None);
    let mapping = Mapping::builtin("llama").unwrap();
    let model = Model::dense("llama");
    let own = mapping.facts_of_config(&model.config()).unwrap();
    let hf = safetensors(&model.tensors());
    let there = to_megatron_of(&hf, &mapping, &own, &MapOptions::default()).unwrap();
    let found = recognize(&block_on(there.source.metadata()).unwrap(), &facts).unwrap();
    assert!(matches!(found, Recognition::Found { family, .. } if family == "llama"));
    let back = to_hf_of(&there.source, &mapping, &facts, &MapOptions::default()).unwrap();
    let config = mapping.config_json(&back.facts).unwrap();
    for (field, value) in [
        ("num_key_value_heads", json!(2)),
        ("head_dim", json!(4)),
        ("rms_norm_eps", json!(1e-5)),
        ("rope_theta", json!(5e5)),
        ("vocab_size", json!(11)),
        ("max_position_embeddings", json!(4096)),
        ("tie_word_embeddings", json!(false)),
    ] {
        assert_eq!(config[field], value, "{field}");
    }
    assert_eq!(config["rope_scaling"]["factor"], 32.0);
    assert_eq!(config["rope_scaling"]["original_max_position_embeddings"], 8192);
}

#[test]
fn other_places_and_names() {
    // A model that is built from a configuration has that of its layers below its own.
    let built = "\
model:
  _builder_: megatron.training.models.gpt.GPTModelBuilder
  seq_length: 64
  share_embeddings_and_output_weights: true
  transformer:
    _target_: megatron.core.transformer.transformer_config.TransformerConfig
    num_layers: 2
    num_moe_experts: 8
    multi_latent_attention: true
    max_position_embeddings: 16
  yarn_mscale: 0.7
";
    let facts = Facts::from_run_config(built, "run_config.yaml").unwrap();
    assert_eq!(facts.get("num_experts"), Some(&json!(8)));
    assert_eq!(facts.get("untie_embeddings_and_output_weights"), Some(&json!(false)));
    assert_eq!(facts.get("original_max_position_embeddings"), Some(&json!(16)));
    assert_eq!(facts.get("max_position_embeddings"), Some(&json!(64)));
    assert_eq!(facts.get("mscale"), Some(&json!(0.7)));
    // NeMo's, with rotary numbers that Megatron-LM has no arguments for.
    let nemo = "\
_target_: nemo.collections.llm.gpt.model.llama.LlamaModel
config:
  _target_: nemo.collections.llm.gpt.model.llama.Llama31Config8B
  activation_func:
    _call_: false
    _target_: torch._C._nn.gelu
  bias_activation_fusion: true
  high_freq_factor: 4
  low_freq_factor: 2
  num_layers: 2
  old_context_len: 1024
  scale_factor: 8
optim: null
";
    let facts = Facts::from_run_config(nemo, "model.yaml").unwrap();
    assert_eq!(facts.get("use_rope_scaling"), Some(&json!(true)));
    assert_eq!(facts.get("bias_gelu_fusion"), Some(&json!(true)));
    assert_eq!(facts.get("swiglu"), Some(&json!(false)));
    let mapping = Mapping::builtin("llama").unwrap();
    let full = facts
        .with("num_attention_heads", 2)
        .with("max_position_embeddings", 64)
        .with("layernorm_epsilon", 1e-5)
        .with("rotary_base", 1e4);
    let config = mapping.config_json(&full).unwrap();
    let expected = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2, "high_freq_factor": 4,
        "original_max_position_embeddings": 1024,
    });
    assert_eq!(config["rope_scaling"], expected);
}

#[test]
fn files_that_tell_of_no_model() {
    for (text, shown) in [
        ("", "run_config.yaml:1: it says nothing of a model"),
        ("model: {hidden_size: 8}", "there is no num_layers"),
        ("model:\n  a: [1\n", "run_config.yaml:3: "),
    ] {
        let error = Facts::from_run_config(text, "run_config.yaml").unwrap_err().to_string();
        assert!(error.contains(shown), "{error}");
    }
    let facts = Facts::from_run_config("model: {num_layers: 2, x: {y: 1}}", "a").unwrap();
    assert_eq!(facts.get("x"), None::<&Value>);
}
