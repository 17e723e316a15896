//! Checkpoints that Megatron wrote.

use std::collections::BTreeSet;

use dcp_jobs::Source;
use dcp_jobs::read::read_object;
use dcp_mapping::{Facts, LayerSpec, MapOptions, Mapping, Padding, Recognition, recognize};

use crate::support::{
    Tensor, Tensors, arguments, block_on, contents, fixture, safetensors, stored, to_hf_of,
    to_megatron_of,
};

#[test]
fn a_dense_model_of_two_by_two_ranks() {
    let (source, expected) = fixture("gpt_tp2pp2_swiglu");
    let mapping = Mapping::builtin("llama").unwrap();
    let facts = Facts::new().with("num_attention_heads", 4).with("num_query_groups", 2);
    let mapped = to_hf_of(&source, &mapping, &facts, &MapOptions::default());
    let mapped = mapped.unwrap();
    let hf = contents(&mapped.source);
    assert_eq!(hf.len(), 2 + 2 * 9);
    let stored = |name: &str| &expected[name];
    let fused = stored("decoder.layers.self_attention.linear_qkv.weight");
    for layer in 0..2 {
        let get = |name: &str| &hf[&format!("model.layers.{layer}.{name}.weight")];
        let q = Tensor::new(&[8, 8], |at| {
            // Two heads of two channels, then key and value of two channels each.
            let (group, row) = (at[0] / 4, at[0] % 4);
            fused.at(&[layer, group * 8 + row, at[1]])
        });
        let k = Tensor::new(&[4, 8], |at| fused.at(&[layer, at[0] / 2 * 8 + 4 + at[0] % 2, at[1]]));
        let v = Tensor::new(&[4, 8], |at| fused.at(&[layer, at[0] / 2 * 8 + 6 + at[0] % 2, at[1]]));
        assert_eq!(*get("self_attn.q_proj"), q);
        assert_eq!(*get("self_attn.k_proj"), k);
        assert_eq!(*get("self_attn.v_proj"), v);
        let fc1 = stored("decoder.layers.mlp.linear_fc1.weight");
        let gate = Tensor::new(&[12, 8], |at| fc1.at(&[layer, at[0], at[1]]));
        let up = Tensor::new(&[12, 8], |at| fc1.at(&[layer, at[0] + 12, at[1]]));
        assert_eq!(*get("mlp.gate_proj"), gate);
        assert_eq!(*get("mlp.up_proj"), up);
        let norm = stored("decoder.layers.mlp.linear_fc1.layer_norm_weight");
        let norm = Tensor::new(&[8], |at| norm.at(&[layer, at[0]]));
        assert_eq!(*get("post_attention_layernorm"), norm);
    }
    assert_eq!(hf["model.embed_tokens.weight"], *stored("embedding.word_embeddings.weight"));
    assert!(mapped.report.tied);
    assert_eq!(mapped.report.notes.len(), 1, "{:?}", mapped.report.notes);
    // The arguments do not define the model.
    let error = mapping.config_json(&mapped.facts).unwrap_err().to_string();
    assert!(error.contains("max_position_embeddings, rms_norm_eps, rope_theta"), "{error}");
    let facts = mapped.facts.clone().with("max_position_embeddings", 64);
    let facts = facts.with("layernorm_epsilon", 1e-5).with("rotary_base", 10000);
    let config = mapping.config_json(&facts).unwrap();
    assert_eq!(config["num_hidden_layers"], 2);
    assert_eq!(config["head_dim"], 2);
    assert_eq!(config["vocab_size"], 16);
    assert_eq!(config["tie_word_embeddings"], true);
    assert_eq!(config["torch_dtype"], "float32");
}

#[test]
fn experts_of_two_ranks() {
    let (source, expected) = fixture("gpt_moe_ep2_swiglu");
    let mapping = Mapping::builtin("mixtral").unwrap();
    let facts = Facts::new().with("num_attention_heads", 4);
    let mapped = to_hf_of(&source, &mapping, &facts, &MapOptions::default());
    let mapped = mapped.unwrap();
    let hf = contents(&mapped.source);
    assert_eq!(hf.len(), 2 + 2 * (7 + 3 * 4));
    let fc1 = &expected["decoder.layers.mlp.experts.experts.linear_fc1.weight"];
    let fc2 = &expected["decoder.layers.mlp.experts.experts.linear_fc2.weight"];
    for (layer, expert) in [(0, 0), (0, 3), (1, 2)] {
        let get = |name: &str| {
            &hf[&format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight")]
        };
        let gate = Tensor::new(&[12, 8], |at| fc1.at(&[layer, expert, at[0], at[1]]));
        let up = Tensor::new(&[12, 8], |at| fc1.at(&[layer, expert, at[0] + 12, at[1]]));
        let down = Tensor::new(&[8, 12], |at| fc2.at(&[layer, expert, at[0], at[1]]));
        assert_eq!((get("w1"), get("w3"), get("w2")), (&gate, &up, &down));
    }
    // The local layer specification's name for it.
    let norm = &expected["decoder.layers.mlp.linear_fc1.layer_norm_weight"];
    let norm = Tensor::new(&[8], |at| norm.at(&[1, at[0]]));
    assert_eq!(hf["model.layers.1.post_attention_layernorm.weight"], norm);
    assert!(mapping.config_json(&mapped.facts).is_err());
    let facts = mapped.facts.clone().with("max_position_embeddings", 64);
    let facts = facts.with("layernorm_epsilon", 1e-5).with("rotary_base", 10000);
    let config = mapping.config_json(&facts.with("moe_router_topk", 2)).unwrap();
    assert_eq!(config["num_local_experts"], 4);
    assert_eq!(config["intermediate_size"], 12);
    assert_eq!(config["num_key_value_heads"], 4);
}

#[test]
fn halves_of_a_gate_that_are_stored_apart() {
    let (source, expected) = fixture("v015_moe_singleton");
    let mapping = Mapping::builtin("mixtral").unwrap();
    let facts = Facts::new().with("num_attention_heads", 4);
    let mapped = to_hf_of(&source, &mapping, &facts, &MapOptions::default());
    let hf = contents(&mapped.unwrap().source);
    for (name, stored) in [
        ("1.w1.weight", "1.linear_fc1.weight_w"),
        ("1.w3.weight", "1.linear_fc1.weight_v"),
        ("0.w2.weight", "0.linear_fc2.weight"),
    ] {
        let name = format!("model.layers.0.block_sparse_moe.experts.{name}");
        let stored = format!("decoder.layers.0.mlp.experts.experts.{stored}");
        assert_eq!(hf[&name], expected[&stored]);
    }
}

/// Megatron-FSDP's names for the same: those of modules, of experts by their numbers in all.
#[test]
fn the_names_of_megatron_fsdp() {
    let (_, expected) = fixture("v015_moe_singleton");
    let mapping = Mapping::builtin("mixtral").unwrap();
    let facts = Facts::new().with("num_attention_heads", 4);
    let model = expected.into_iter().filter(|(name, _)| !name.starts_with("optimizer."));
    let model: Tensors = model.collect();
    let mapped = |tensors: &Tensors| {
        let source = safetensors(tensors);
        let mapped = to_hf_of(&source, &mapping, &facts, &MapOptions::default()).unwrap();
        assert_eq!(recognized(&source), "mixtral");
        contents(&mapped.source)
    };
    let wanted = mapped(&model);
    for sequential in [false, true] {
        let renamed = model.iter().map(|(name, tensor)| {
            let named = match name.split_once("experts.experts.") {
                Some((before, rest)) if sequential => {
                    format!("{before}experts.local_experts.{rest}")
                }
                Some((before, rest)) => {
                    let (number, matrix) = rest.split_once('.').unwrap();
                    let (matrix, half) = matrix.split_once(".weight").unwrap();
                    format!("{before}experts.{matrix}.weight{number}{half}")
                }
                None => name.clone(),
            };
            (format!("model.module.{named}"), tensor.clone())
        });
        assert_eq!(mapped(&renamed.collect()), wanted);
    }
}

fn recognized(source: &Source) -> String {
    let metadata = block_on(source.metadata()).unwrap();
    match recognize(&metadata, &Facts::new()).unwrap() {
        Recognition::Found { family, .. } => family,
        other => format!("{other:?}"),
    }
}

#[test]
fn a_run_with_all_its_arguments() {
    let (name, options) = ("run_torch_dist_dp2", MapOptions::default());
    let mapping = Mapping::builtin("llama").unwrap();
    let mapped = to_hf_of(&stored(name), &mapping, &arguments(name), &options).unwrap();
    // The optimizer is no part of the model.
    assert!(mapped.report.dropped.iter().any(|key| key.starts_with("optimizer.")));
    assert_eq!(mapped.report.notes, [""; 0]);
    let metadata = block_on(mapped.source.metadata()).unwrap();
    let shape = |name: &str| metadata.get(name).unwrap().as_tensor().unwrap().shape.to_vec();
    // It says that there is one query group, and that there are no groups.
    assert_eq!(shape("model.layers.0.self_attn.k_proj.weight"), [8, 8]);
    // And that the vocabulary has 15 tokens, of a tokenizer that has one more.
    assert_eq!(shape("model.embed_tokens.weight"), [16, 8]);
    let config = mapping.config_json(&mapped.facts).unwrap();
    assert_eq!(config["num_key_value_heads"], 4);
    assert_eq!(config["rope_theta"], 10000.0);
    assert_eq!(config["rms_norm_eps"], 1e-5);
    assert_eq!(config["torch_dtype"], "bfloat16");
    assert_eq!(config["max_position_embeddings"], 8);
    // Those of Llama's tokenizer would be taken else.
    assert!(config["bos_token_id"].is_null() && config.get("eos_token_id").is_some());
}

#[test]
fn a_run_that_was_saved_through_pytorch_alone() {
    let mapping = Mapping::builtin("llama").unwrap();
    let facts = Facts::new().with("num_attention_heads", 4);
    let source = stored("run_torch_dcp");
    let mapped = to_hf_of(&source, &mapping, &facts, &MapOptions::default()).unwrap();
    let metadata = block_on(mapped.source.metadata()).unwrap();
    let shape = |name: &str| metadata.get(name).unwrap().as_tensor().unwrap().shape.to_vec();
    assert_eq!(shape("model.layers.0.self_attn.q_proj.weight"), [8, 8]);
    assert_eq!(shape("model.layers.0.mlp.up_proj.weight"), [12, 8]);
    assert!(mapped.report.used.iter().all(|key| key.starts_with("model.")));
}

/// The keys of a model: without those of the run.
fn keys(source: &Source) -> BTreeSet<String> {
    let metadata = block_on(source.metadata()).unwrap();
    let names = metadata.iter().map(|(name, _)| name.to_string());
    let of_model = |name: &String| ["decoder.", "embedding."].iter().any(|p| name.starts_with(p));
    names.filter(of_model).collect()
}

#[test]
fn all_that_a_model_of_megatron_asks_for_is_made() {
    let mut local = MapOptions::default();
    local.spec = LayerSpec::Local;
    for (name, family) in [("gpt_tp2pp2_swiglu", "llama"), ("gpt_moe_ep2_swiglu", "mixtral")] {
        let (source, mapping) = (stored(name), Mapping::builtin(family).unwrap());
        let facts = Facts::new().with("num_attention_heads", 4);
        let hf = to_hf_of(&source, &mapping, &facts, &local).unwrap();
        let facts = hf.facts.clone().with_padding(Padding::Exactly(16));
        let made = to_megatron_of(&hf.source, &mapping, &facts, &local).unwrap();
        assert_eq!(keys(&made.source), keys(&source), "{name}");
        let state = "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2";
        let object = |source| format!("{:?}", block_on(read_object(source, state)).unwrap());
        assert_eq!(object(&made.source), object(&source));
    }
}
